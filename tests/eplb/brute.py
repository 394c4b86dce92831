"""The smallest peak of all valid placements of one layer, by trying them all."""

from functools import lru_cache
from itertools import combinations, combinations_with_replacement

import numpy as np


@lru_cache(maxsize=64)
def arrangements(experts: int, slots: int, ranks: int) -> np.ndarray:
    """bool [arrangements, ranks, experts]: every way to hold each expert at least once, up to names of equal ranks."""
    size = [slots // ranks + (r < slots % ranks) for r in range(ranks)]
    rows = {s: [sum(1 << e for e in c) for c in combinations(range(experts), s)] for s in set(size)}
    blocks = [list(combinations_with_replacement(rows[s], size.count(s))) for s in sorted(set(size), reverse=True)]
    found = [()]
    for b in blocks:
        found = [a + c for a in found for c in b]
    whole = (1 << experts) - 1
    masks = np.array([f for f in found if np.bitwise_or.reduce(f) == whole], np.int64)
    return (masks[:, :, None] >> np.arange(experts) & 1).astype(bool)


def best_peak(load: np.ndarray, slots: int, ranks: int) -> float:
    """The least possible peak of a rank for loads [experts], each split evenly over its replicas."""
    held = arrangements(len(load), slots, ranks)
    unit = load / held.sum(1)                                   # [arrangements, experts]
    return float((held * unit[:, None, :]).sum(2).max(1).min())
