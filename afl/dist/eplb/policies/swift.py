"""Choose the spare replicas anew, then exchange a few experts of the hottest rank; one transfer per pair of ranks.

The first slot of an expert, counting slot 0 of all ranks, then slot 1, ..., is its base and stays; others are spare.
Source: vLLM-Ascend, policy 2 ("swift balancer"); thresholds refer to the layer's own average load.
"""

import numpy as np

from afl.dist.eplb.problem import held_of, require, settle
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology

ENOUGH, LEAST_GAIN, EXCHANGES = 1.01, 0.01, 100     # peak over average; of the average per exchange; per layer


def rebalance(load: LoadWindow, now: Placement, topology: Topology, params: Params) -> Placement:
    """The placement with new spare replicas; a layer whose peak would not fall stays as it is."""
    require(load, now, topology, params)
    out = now.by_rank.copy()
    for layer, weight in enumerate(load.total.astype(np.float64)):
        before = _loads(held_of(out[layer], load.experts), weight)
        if weight.sum() > 0 and before.max() >= ENOUGH * before.mean():
            held = _spread(weight, out[layer])
            if held is not None and _loads(held, weight).max() < before.max():
                out[layer] = settle(held, out[layer])
    return Placement(out.reshape(now.layers, -1), now.ranks)


def _loads(held: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (held * (weight / held.sum(0))).sum(1)


def _spread(weight: np.ndarray, now: np.ndarray) -> np.ndarray | None:
    """bool [ranks, experts]: who shall hold what; None if a spare slot finds no expert that its rank lacks."""
    ranks, experts = len(now), len(weight)
    slots = now.T.reshape(-1)                                           # slot-major: slot 0 of all ranks first
    first = np.array([np.flatnonzero(slots == e)[0] for e in range(experts)])
    home = first % ranks
    held = np.zeros((ranks, experts), np.bool_)
    held[home, np.arange(experts)] = True
    free = (now >= 0).sum(1) - held.sum(1)
    unit, copies = _copies(weight, int(free.sum()), ranks)
    load = (held * unit).sum(1)
    sent = np.zeros((ranks, ranks), np.int64)
    got = np.zeros((ranks, experts), np.bool_)                          # transfers of this plan
    order = np.argsort(-unit, kind="stable")
    for e in np.repeat(order, copies[order]):
        able = (free > 0) & ~held[:, e] & (sent[home[e]] < 1)
        if able.any():
            r = int(np.where(able, load, np.inf).argmin())
            held[r, e] = got[r, e] = True
            free[r] -= 1
            load[r] += unit[e]
            sent[home[e], r] += 1
    unit = weight / held.sum(0)
    for r in np.repeat(np.arange(ranks), free):
        e = int(np.where(held[r], -np.inf, unit).argmax())
        if held[r, e]:
            return None
        unit[e] *= held[:, e].sum() / (held[:, e].sum() + 1)
        held[r, e] = got[r, e] = True
    _exchange(weight / held.sum(0), held, got, sent)
    return held


def _copies(weight: np.ndarray, spare: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Load of one replica and spare replicas of each expert, the hottest replica split first."""
    unit, copies = weight.copy(), np.zeros(len(weight), np.int64)
    for _ in range(spare):
        e = int(np.where(copies + 1 < ranks, unit, -np.inf).argmax())
        if copies[e] + 1 < ranks:
            unit[e] *= (copies[e] + 1) / (copies[e] + 2)
            copies[e] += 1
    return unit, copies


def _exchange(unit: np.ndarray, held: np.ndarray, got: np.ndarray, sent: np.ndarray) -> None:
    """Exchange experts of the hottest rank as long as the hotter of the two falls by enough; changes `held`."""
    load = (held * unit).sum(1)
    average = load.mean()
    for _ in range(EXCHANGES):
        hot = int(load.argmax())
        for q in np.argsort(load, kind="stable"):
            if q == hot or sent[hot, q] or sent[q, hot]:
                continue
            give = np.flatnonzero(held[hot] & ~held[q] & ~got[hot])
            take = np.flatnonzero(held[q] & ~held[hot] & ~got[q])
            if not len(give) or not len(take):
                continue
            d = unit[give][:, None] - unit[take]
            peak = np.maximum(load[hot] - d, load[q] + d)
            i, j = np.unravel_index(int(peak.argmin()), peak.shape)
            if peak[i, j] > load[hot] - LEAST_GAIN * average:
                continue
            a, b = give[i], take[j]
            held[hot, a] = held[q, b] = False
            held[hot, b] = held[q, a] = got[hot, b] = got[q, a] = True
            sent[hot, q] += 1
            sent[q, hot] += 1
            load[hot] -= d[i, j]
            load[q] += d[i, j]
            break
        else:
            return
