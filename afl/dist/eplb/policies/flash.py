"""Mean plus z standard deviations, with covariances between experts: FlashLB's rule.

Replica numbers are searched group by group of experts, hottest group first; each trial is packed anew and scored on
the samples.  Ranks are then renamed so that as many experts as possible stay, and stay in their slots.
Source: vLLM-Ascend, policy 3 ("FlashLB").  The tree is a sequence of line searches there, too; local search over swaps
of the packed result, which other descriptions mention, is part of the `afl` policy.
"""

import numpy as np

from afl.dist.eplb.loops import compiled, covariance, pack_risk, peaks, replicate
from afl.dist.eplb.problem import held_of, relabel, require, settle, sizes
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology

SAMPLES, DEPTH, WIDTH = 64, 4, 8
ENOUGH = {False: 0.85, True: 0.9}       # average over peak above which a layer stays; True: fewer than 32 ranks


def rebalance(load: LoadWindow, now: Placement, topology: Topology, params: Params) -> Placement:
    """The placement of least risk; layers that are balanced well enough over the samples stay as they are."""
    require(load, now, topology, params)
    if not load.total.any():
        return now
    rows = load.samples() + 1.0                                             # smoothing
    out = now.by_rank.copy()
    for layer in np.flatnonzero(load.total.any(1)):
        size = sizes(out[layer])
        x = np.ascontiguousarray(rows[:, layer])
        held = held_of(out[layer], load.experts)
        if 1 / compiled(peaks)(x, held.sum(0), held).mean() >= ENOUGH[now.ranks < 32]:
            continue
        found = search(grouped(x), size, params.z)
        if found is not None:
            out[layer] = settle(relabel(found, out[layer]), out[layer])
    return Placement(out.reshape(now.layers, -1), now.ranks)


def grouped(x: np.ndarray) -> np.ndarray:
    """float64 [at most 64, experts]: sums over consecutive rows of x [steps, experts], the latest ones."""
    width = max(len(x) // SAMPLES, 1)
    n = min(len(x) // width, SAMPLES)
    return np.ascontiguousarray(x[len(x) - n * width:].reshape(n, width, -1).sum(1))


def search(x: np.ndarray, size: np.ndarray, z: float) -> np.ndarray | None:
    """bool [ranks, experts] for samples [m, experts] on ranks of `size` slots; None if a replica finds no rank."""
    experts, ranks = x.shape[1], len(size)
    mean, cov = x.mean(0), np.empty((experts, experts))
    compiled(covariance)(x, cov)
    var = np.diag(cov).copy()
    risk = mean + z * np.sqrt(var)
    order = np.argsort(-risk, kind="stable")
    groups = np.array_split(order, np.arange(1, DEPTH) * -(-experts // DEPTH))
    groups = [g for g in groups if len(g)]
    count = np.ones(experts, np.int64)
    left = int(size.sum()) - experts

    def trial(now: np.ndarray) -> tuple[float, np.ndarray | None]:
        held = np.zeros((ranks, experts), np.bool_)
        by_load = np.argsort(-(mean / now), kind="stable")
        if now.sum() != size.sum() or not compiled(pack_risk)(by_load, mean, cov, now, z, size, held):
            return np.inf, None
        return float(compiled(peaks)(x, now, held).mean()), held

    for i, group in enumerate(groups[:-1]):
        if left == 0:
            break
        rest = np.concatenate(groups[i + 1:])
        both = np.concatenate([group, rest])
        first = int(compiled(replicate)(risk[both], left, ranks)[-1][:len(group)].sum()) - len(group)
        here, there = (compiled(replicate)(risk[g], left, ranks) for g in (group, rest))
        best, chosen = np.inf, first
        reach = min(max(first, left - first), WIDTH)
        steps = [0, *(s * k for k in range(1, reach + 1) for s in (-1, 1))]
        for n in [first + s for s in steps if 0 <= first + s <= left]:
            count[group], count[rest] = here[n], there[left - n]
            score, _ = trial(count)
            if score < best:
                best, chosen = score, n
        count[group], count[rest] = here[chosen], there[left - chosen]
        left -= chosen
    if left:
        count[groups[-1]] = compiled(replicate)(risk[groups[-1]], left, ranks)[-1]
    return trial(count)[1]
