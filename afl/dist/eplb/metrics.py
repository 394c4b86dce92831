"""How good a placement is for given loads, and what it costs to get there.

The load of an expert splits evenly over its replicas; PAR is the peak over the average of the ranks' loads.
"""

import numpy as np

from afl.dist.eplb.values import Placement


def shares(placement: Placement, experts: int) -> np.ndarray:
    """float64 [layers, ranks, experts]: the part of each expert's load that each rank takes."""
    out = np.zeros((placement.layers, placement.ranks, experts))
    layer, rank, slot = np.nonzero(placement.by_rank >= 0)
    np.add.at(out, (layer, rank, placement.by_rank[layer, rank, slot]), 1.0)
    return out / np.maximum(placement.counts(experts), 1)[:, None, :]


def rank_loads(counts: np.ndarray, placement: Placement) -> np.ndarray:
    """float64 [..., layers, ranks] of counts [..., layers, experts]."""
    return np.einsum("...le,lre->...lr", counts, shares(placement, counts.shape[-1]), optimize=True)


def par(loads: np.ndarray) -> np.ndarray:
    """Peak over average along the last axis; 1 where there is no load.

    >>> par(np.array([[3.0, 1.0], [0.0, 0.0]])).tolist()
    [1.5, 1.0]
    """
    mean = loads.mean(-1)
    return np.where(mean > 0, loads.max(-1) / np.where(mean > 0, mean, 1), 1.0)


def window_par(counts: np.ndarray, placement: Placement) -> np.ndarray:
    """float64 [layers]: PAR of the sums over steps; counts [steps, layers, experts]."""
    return par(rank_loads(counts.sum(0, dtype=np.float64), placement))


def step_par(counts: np.ndarray, placement: Placement) -> np.ndarray:
    """float64 [layers]: mean over steps of the PAR of a step; counts [steps, layers, experts]."""
    part = shares(placement, counts.shape[-1])
    return np.stack([par(counts[:, layer].astype(np.float64) @ part[layer].T).mean(0) for layer in range(len(part))])


def moves(old: Placement, new: Placement) -> int:
    """How many experts a rank has that it did not have before, over all layers."""
    total = 0
    for a, b in zip(old.by_rank.reshape(-1, old.slots_per_rank), new.by_rank.reshape(-1, new.slots_per_rank),
                    strict=True):
        total += len(np.setdiff1d(b[b >= 0], a))
    return total


def lower_bound(load: np.ndarray, slots: int, ranks: int) -> float:
    """No placement of `slots` replicas has a smaller PAR for the loads [experts] of a layer, whatever it replicates.

    The hottest expert, replicated as the greedy rule does (which minimises the hottest replica), against the average.
    """
    load = np.asarray(load, np.float64)
    if load.sum() <= 0:
        return 1.0
    count = np.ones(len(load), np.int64)
    for _ in range(slots - len(load)):
        unit = np.where(count < ranks, load / count, -1.0)
        count[unit.argmax()] += 1
    return max(1.0, float((load / count).max() * ranks / load.sum()))
