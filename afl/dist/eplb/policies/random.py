"""A valid placement drawn at random: something to test the way of transfers with.  Depends on `params.seed` only."""

import numpy as np

from afl.dist.eplb.policies.greedy import flat
from afl.dist.eplb.problem import require, settle, sizes
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology


def rebalance(load: LoadWindow, now: Placement, topology: Topology, params: Params) -> Placement:
    """Greedy packing for loads that are drawn anew; experts that happen to stay on a rank keep their slots."""
    require(load, now, topology, params)
    rng = np.random.default_rng(params.seed)
    out = now.by_rank.copy()
    for layer in range(now.layers):
        held = flat(rng.random(load.experts) + 1e-3, sizes(out[layer]))
        if held is not None:
            out[layer] = settle(held, out[layer])
    return Placement(out.reshape(now.layers, -1), now.ranks)
