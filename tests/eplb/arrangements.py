"""Random valid placements and topologies, the material of the tests of transfers, tables and the machine."""

import numpy as np

from afl.dist.eplb.values import Placement, Topology


def some_placement(rng, layers, experts, slots, ranks):
    """Any valid placement: each expert once somewhere, the other slots filled with experts that the rank lacks."""
    shape = Placement.initial(layers, experts, slots, ranks)
    rows = shape.phys_to_log.copy()
    size = shape.slots_per_rank
    for row in rows:
        real = rng.permutation(np.flatnonzero(row >= 0))
        row[row >= 0] = -2
        row[real[:experts]] = rng.permutation(experts)
        for s in real[experts:]:
            held = row[s // size * size:][:size]
            row[s] = rng.choice(np.setdiff1d(np.arange(experts), held))
    return Placement(rows, ranks)


def some_sizes(rng, most_ranks=9):
    """(layers, experts, slots, ranks) with 1 <= slots per rank <= experts, uneven ones included."""
    ranks = int(rng.integers(1, most_ranks + 1))
    experts = int(rng.integers(1, 25))
    slots = int(rng.integers(max(experts, ranks), max(experts, ranks) + 2 * ranks + 1))
    slots = max(min(slots, experts * ranks), experts, 1)
    if slots < ranks or -(-slots // ranks) > experts:
        return some_sizes(rng, most_ranks)
    return int(rng.integers(1, 4)), experts, slots, ranks


def some_topology(rng, ranks):
    nodes = np.sort(rng.integers(0, 3, ranks))
    return Topology(ranks, nodes, np.arange(ranks) // 2)
