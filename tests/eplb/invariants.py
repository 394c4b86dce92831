"""What docs/eplb.md says of each policy: name of a row -> function of an instance that is true if it holds."""

import attrs
import numpy as np

from afl.dist.eplb.plan import plan
from afl.dist.eplb.values import LoadWindow, Placement, Topology


def _plan(x, policy, **more):
    window, now, topology, params = x
    return plan(more.pop("window", window), more.pop("now", now), topology, attrs.evolve(params, **more), policy)


def moved(a, b):
    return a.phys_to_log != b.phys_to_log


def pinned(x, policy):
    now = x[1]
    places = [(layer, r, s) for layer, r, s in np.argwhere(now.by_rank >= 0).tolist() if (layer + r + s) % 3 == 0]
    new = _plan(x, policy, pinned=frozenset(places)).placement
    return all(new.by_rank[p] == now.by_rank[p] for p in places)


def budget(x, policy):
    now, frac = x[1], 0.1
    n = moved(now, _plan(x, policy, max_move_frac=frac).placement).sum(1)
    return (n <= frac * (now.phys_to_log >= 0).sum(1)).all()


def never_worse(x, policy):
    p = _plan(x, policy)
    return (p.par_after <= p.par_before + 1e-9).all()


def idempotent(x, policy):
    free = {"max_move_frac": 1e9}
    p = _plan(x, policy, **free).placement
    return _plan(x, policy, now=p, **free).placement == p


def no_load(x, policy):
    w = x[0]
    return _plan(x, policy, window=LoadWindow.of(np.zeros((3, *w.total.shape), int))).placement == x[1]


def even(x, policy):
    w = x[0]
    plain = Placement.initial(w.layers, w.experts, w.experts * x[1].ranks, x[1].ranks)      # everything everywhere
    return _plan(x, policy, now=plain).placement == plain


def one_rank(x, policy):
    w = x[0]
    alone = Placement.initial(w.layers, w.experts, w.experts, 1)
    return plan(w, alone, Topology.regular(1), x[3], policy).placement == alone


def scale(x, policy):
    w = x[0]
    tenfold = attrs.evolve(w, total=w.total * 8, blocks=tuple(b * 8 for b in w.blocks), ewma_sum=w.ewma_sum * 8)
    return _plan(x, policy).placement == _plan(x, policy, window=tenfold).placement


ROWS = {
    "pinned slots keep their expert": pinned,
    "moves per layer within the budget": budget,
    "no layer's forecast peak rises": never_worse,
    "planning again from the same load moves nothing": idempotent,
    "no load, no move": no_load,
    "every expert on every rank, no move": even,
    "one rank, no move": one_rank,
    "loads times eight, same plan": scale,
}
