"""Tables from logical to physical: every slot right, every replica used alike, whoever is sending."""

from itertools import combinations

import numpy as np
import pytest
from arrangements import some_placement, some_sizes

from afl.dist.eplb.metrics import rank_loads
from afl.dist.eplb.routing import choose, routes, table, turns
from afl.dist.eplb.values import Placement
from afl.errors import BalanceError


def placed(seed):
    rng = np.random.default_rng(seed)
    layers, experts, slots, ranks = some_sizes(rng)
    return rng, some_placement(rng, layers, experts, slots, ranks), experts


@pytest.mark.parametrize("seed", range(30))
def test_tables_name_slots_of_the_expert_and_each_replica_once_in_its_turn(seed):
    rng, p, experts = placed(seed)
    r = routes(p, experts, most=p.ranks + 2)
    assert r.phys.shape == (p.layers, experts, p.ranks + 2) and r.phys.dtype == r.count.dtype == np.int32
    for layer in range(p.layers):
        t = table(r, layer, 40)
        assert (p.phys_to_log[layer][t] == np.arange(experts)).all()
        for e in range(experts):
            n = int(r.count[layer, e])
            for first in range(40 - n + 1):
                assert len(set(t[first:first + n, e].tolist())) == n
        again = Placement(np.roll(p.phys_to_log, 1, 0), p.ranks)       # other layers do not matter
        assert (table(routes(again, experts, most=p.ranks + 2), (layer + 1) % p.layers, 40) == t).all()


@pytest.mark.parametrize("seed", range(30))
def test_every_replica_gets_the_same_number_of_a_ranks_tokens(seed):
    rng, p, experts = placed(seed)
    r = routes(p, experts)
    weights = rng.dirichlet(np.full(experts, 0.3))
    chosen = rng.choice(experts, (int(rng.integers(0, 200)), 1), p=weights)
    live = rng.random(len(chosen)) < 0.8
    for layer in range(p.layers):
        slot = choose(r, layer, chosen, int(rng.integers(0, 16)), live)
        assert (slot[~live] == -1).all()
        assert (p.phys_to_log[layer][slot[live]] == chosen[live]).all()
        n = np.bincount(slot[live].reshape(-1), minlength=p.slots)
        for e in range(experts):
            mine = n[p.phys_to_log[layer] == e]
            assert mine.max() - mine.min() <= 1


def test_the_split_is_the_one_that_the_planner_counts_on():
    rng = np.random.default_rng(0)
    p = some_placement(rng, 1, 8, 16, 4)
    r, total, log = routes(p, 8), np.zeros(p.ranks), np.zeros(8)
    for q in range(16):                                                # 4 x 4 ranks, most of them idle
        if q in (1, 6, 7, 12):
            chosen = rng.choice(8, (4096, 2), p=rng.dirichlet(np.ones(8)))
            slot = choose(r, 0, chosen, q % 4 + q // 4)
            total += np.bincount(slot.reshape(-1) // p.slots_per_rank, minlength=p.ranks)
            log += np.bincount(chosen.reshape(-1), minlength=8)
    assert np.abs(total - rank_loads(log[None], p)[0]).max() <= 4 * p.slots_per_rank   # one token per sender and slot


@pytest.mark.parametrize("replicas", range(1, 9))
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_single_tokens_of_many_ranks_spread_though_part_of_an_axis_is_idle(replicas, tp):
    p = Placement(np.zeros((1, replicas), int), replicas)
    r, dp = routes(p, 1), 16
    for size in range(1, tp + 1):
        for active in combinations(range(tp), size):                   # tp ranks with tokens, the same for every dp
            n = np.zeros(replicas, int)
            for d in range(dp):
                for q in active:
                    n[choose(r, 0, np.array([[0]]), d + q)] += 1
            even = dp * size / replicas
            assert n.max() <= even + size and n.min() >= even - size, (active, n)


def test_turns_count_earlier_choices_and_skip_padding():
    chosen, live = np.array([[1, 0], [1, 2], [1, 0], [0, 1]]), np.array([True, False, True, True])
    assert turns(chosen, live).tolist() == [[0, 0], [-1, -1], [1, 1], [2, 2]]
    assert turns(np.zeros((0, 2), int)).shape == (0, 2)


def test_holes_are_never_routed_to():
    p = Placement.initial(1, 128, 128, 6)
    assert p.slots == 132 and (p.phys_to_log < 0).sum() == 4
    assert (p.phys_to_log[0][table(routes(p, 128), 0, 64)] == np.arange(128)).all()


def test_unusable_placements_are_refused():
    with pytest.raises(BalanceError, match="on no rank"):
        routes(Placement([[0, 0]], 2), 2)
    with pytest.raises(BalanceError, match="3 replicas, the tables have 2 columns"):
        routes(Placement([[0, 0, 0]], 3), 1, most=2)
