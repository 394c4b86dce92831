"""Replicate the hottest experts, then give replicas in descending load to the lightest rank; DeepSeek's rule.

Other than there, a rank never gets two copies of an expert.  Nothing depends on where the experts are now, but an
expert that happens to stay on its rank keeps its slot.  With `groups` > 1 that the nodes divide, whole expert groups
are packed onto nodes first (hierarchical); it pays only when routing is limited to groups.
Source: DeepSeek EPLB (github.com/deepseek-ai/EPLB).
"""

import numpy as np

from afl.dist.eplb.loops import compiled, pack, replicate
from afl.dist.eplb.problem import require, settle, sizes
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology


def rebalance(load: LoadWindow, now: Placement, topology: Topology, params: Params) -> Placement:
    """The packed placement; a layer that cannot be packed without duplicates, or has no load, stays as it is."""
    require(load, now, topology, params)
    nodes = [np.flatnonzero(topology.node == n) for n in np.unique(topology.node)]
    out = now.by_rank.copy()
    for layer, weight in enumerate(load.total.astype(np.float64)):
        if weight.sum() == 0:
            continue
        size = sizes(out[layer])
        held = hierarchical(weight, size, nodes, params.groups)
        if held is None:
            held = flat(weight, size)
        if held is not None:
            out[layer] = settle(held, out[layer])
    return Placement(out.reshape(now.layers, -1), now.ranks)


def flat(weight: np.ndarray, size: np.ndarray) -> np.ndarray | None:
    """bool [ranks, experts] for loads [experts] on ranks of `size` slots; None if some replica finds no rank."""
    count = compiled(replicate)(weight, int(size.sum()) - len(weight), len(size))[-1]
    unit = weight / count
    held = np.zeros((len(size), len(weight)), np.bool_)
    ok = count.sum() == size.sum() and compiled(pack)(np.argsort(-unit, kind="stable"), unit, count, size, held)
    return held if ok else None


def hierarchical(weight: np.ndarray, size: np.ndarray, nodes: list[np.ndarray], groups: int) -> np.ndarray | None:
    """As `flat`, with each expert group kept on one node; None where groups, experts and nodes do not divide."""
    experts, n = len(weight), len(nodes)
    if groups < 2 or n < 2 or groups % n or experts % groups or len({len(r) for r in nodes}) > 1:
        return None
    member = np.arange(experts).reshape(groups, -1)                         # [groups, experts of a group]
    heat = weight[member].sum(1)
    on_node = np.zeros((n, groups), np.bool_)
    room = np.full(n, groups // n)
    compiled(pack)(np.argsort(-heat, kind="stable"), heat, np.ones(groups, np.int64), room, on_node)
    held = np.zeros((len(size), experts), np.bool_)
    for i, ranks in enumerate(nodes):
        mine = member[on_node[i]].reshape(-1)
        if not len(mine) <= size[ranks].sum() <= len(mine) * len(ranks):
            return None
        part = flat(weight[mine], size[ranks])
        if part is None:
            return None
        held[np.ix_(ranks, mine)] = part
    return held
