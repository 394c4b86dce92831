"""Cases from the field: uneven experts, redundancy, duplicates on a rank, hot and cold extremes, choice of replicas."""

from itertools import product

import numpy as np
import pytest
from arrangements import some_placement

from afl.dist.eplb import policies
from afl.dist.eplb.diff import settle
from afl.dist.eplb.metrics import rank_loads
from afl.dist.eplb.plan import plan
from afl.dist.eplb.rounds import schedule
from afl.dist.eplb.routing import choose, routes, table
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology
from afl.errors import BalanceError

POLICIES = policies.names()


def planned(load, now, policy):
    window = LoadWindow.of(np.array(load)[None, None])
    params = Params(max_move_frac=1.0, bytes_per_expert=0)
    return plan(window, now, Topology.regular(now.ranks), params, policy).placement


# E05: 128 experts on 6 ranks


def test_uneven_experts_have_documented_holes_that_are_never_routed_to():
    p = Placement.initial(1, 128, 128, 6)
    held = (p.by_rank[0] >= 0).sum(1)
    assert p.slots_per_rank == 22 and sorted(held.tolist()) == [21, 21, 21, 21, 22, 22]
    rng = np.random.default_rng(0)
    r = routes(p, 128)
    slot = choose(r, 0, rng.integers(0, 128, (1000, 8)), 3)
    assert (p.phys_to_log[0][slot] >= 0).all() and (table(r, 0, 64) < p.slots).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_uneven_experts_are_planned_and_moved_like_even_ones(policy):
    rng = np.random.default_rng(0)
    now = some_placement(rng, 1, 128, 128, 6)
    p = planned(rng.lognormal(5, 1, 128).astype(int), now, policy)
    assert ((p.phys_to_log < 0) == (now.phys_to_log < 0)).all() and p.check(128) == []
    assert schedule(now, p, Topology.regular(6), Params(staging=1)).rounds


# E06: redundancy


def test_redundant_slots_name_experts_and_without_any_it_is_the_plain_map():
    p = Placement.initial(1, 256, 272, 16)
    assert p.slots_per_rank == 17 and p.phys_to_log.min() == 0 and p.phys_to_log.max() == 255
    assert (p.counts(256) >= 1).all() and p.by_rank[0, 15].max() < 256
    assert Placement.initial(1, 256, 256, 16).phys_to_log[0].tolist() == list(range(256))
    r = routes(p, 256)
    assert (p.phys_to_log[0][r.phys[0]] == np.arange(256)[:, None]).all()
    plain = routes(Placement.initial(1, 256, 256, 16), 256)
    assert (choose(plain, 0, np.arange(256).reshape(32, 8), 5).reshape(-1) == np.arange(256)).all()


# E07: duplicates on a rank


def best(load, slots, ranks):
    """Peak of the best placement without duplicates and with even splits, by trying all."""
    size, experts, least = slots // ranks, len(load), np.inf
    sets = [s for s in range(1 << experts) if s.bit_count() == size]
    for chosen in product(sets, repeat=ranks):
        if list(chosen) != sorted(chosen):
            continue
        count = [sum(s >> e & 1 for s in chosen) for e in range(experts)]
        if min(count) > 0:
            least = min(least, max(sum(load[e] / count[e] for e in range(experts) if s >> e & 1) for s in chosen))
    return least


@pytest.mark.parametrize(("load", "slots", "ranks", "optimum"), [
    ([13, 14, 2, 9], 6, 2, 19.5), ([13, 14, 2, 9, 17, 16], 8, 4, 18.5), ([9, 37, 5, 17], 6, 2, 36.0),
])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_puts_an_expert_twice_on_a_rank(load, slots, ranks, optimum, policy):
    assert best(load, slots, ranks) == pytest.approx(optimum)
    p = planned(load, Placement.initial(1, len(load), slots, ranks), policy)
    assert p.check(len(load)) == []
    assert rank_loads(np.array([load]), p).max() >= optimum - 1e-9


def test_a_placement_with_a_duplicate_is_refused_everywhere():
    twice = Placement([[3, 0, 2, 1, 1, 0]], 2)
    now = Placement([[0, 1, 2, 3, 0, 1]], 2)
    assert any("2 times" in b for b in twice.check(4))
    for refuse in (lambda: settle(now, twice), lambda: routes(twice, 4),
                   lambda: planned([1, 1, 1, 1], twice, "greedy")):
        with pytest.raises(BalanceError):
            refuse()


# E08: extremes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load", [[100, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 7]])
def test_hot_and_cold_experts_keep_to_the_ranks_there_are(load, policy):
    p = planned(load, Placement.initial(1, 4, 8, 4), policy)
    count = p.counts(4)[0]
    assert p.check(4) == [] and count.max() <= 4 and count.min() >= 1
    if not any(load):
        assert count.tolist() == [2, 2, 2, 2] or policy == "random"


def test_slots_that_the_ranks_do_not_divide_are_padded_with_holes():
    p = Placement.initial(1, 4, 6, 4)
    assert p.slots == 8 and (p.phys_to_log >= 0).sum() == 6
    assert planned([5, 4, 3, 2], p, "greedy").check(4) == []


# E09: choice of replicas, TP 4 and DP 4, four replicas, the last TP rank has only padding


@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_replicas_share_though_the_last_tp_rank_holds_padding(tokens):
    r = routes(Placement([[0, 0, 0, 0]], 4), 1)
    n = np.zeros(4, int)
    for dp, tp in product(range(4), range(4)):
        slot = choose(r, 0, np.zeros((tokens, 1), int), dp + tp, np.full(tokens, tp < 3))
        n += np.bincount(slot[slot >= 0], minlength=4)
    assert n.sum() == 12 * tokens and n.min() / n.max() == 1


# E10: logical and physical numbers


@pytest.mark.parametrize("routing", ["random", "balanced"])
def test_ids_are_logical_before_the_tables_and_physical_after(routing):
    rng = np.random.default_rng(1)
    p = some_placement(rng, 1, 8, 10, 5)
    chosen = np.argsort(rng.random((200, 8)), 1)[:, :2] if routing == "random" else np.arange(400).reshape(200, 2) % 8
    slot = choose(routes(p, 8), 0, chosen, 2)
    assert slot.min() >= 0 and slot.max() < 10 and len(np.unique(slot)) == 10
    assert (p.phys_to_log[0][slot] == chosen).all()
    counted = np.bincount(slot.reshape(-1), minlength=10)
    log = np.zeros(8, int)
    np.add.at(log, p.phys_to_log[0], counted)
    assert (log == np.bincount(chosen.reshape(-1), minlength=8)).all()
