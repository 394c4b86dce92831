"""What every policy must do, and which further properties hold for which policy.

The numbers are those of the balancer's list of invariants: 5 stayers keep their slots, 6 pinned slots stay, 7 moves
stay within the budget, 14 a layer changes only for a smaller peak, 15 planning again changes nothing, 16 no load or a
balanced layer: no move, 17 one rank: no move, 18 names of experts do not matter, 19 the unit of loads does not matter,
20 same bits everywhere (test_determinism.py, all policies), 23 near the optimum of tiny instances.
"""

from itertools import permutations

import attrs
import numpy as np
import pytest
from arrangements import some_placement, some_sizes
from brute import best_peak

from afl.dist.eplb import metrics, policies, traces
from afl.dist.eplb.policies import swift
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology
from afl.errors import BalanceError, ConfigError

HOLDS = {
    "afl": {5, 6, 7, 14, 15, 16, 17, 18, 19, 23},
    "flash": {5, 15, 16, 17, 18},               # adds 1 to every load (19); gates on a threshold, not on a gain (14)
    "greedy": {5, 15, 16, 17, 18, 19},          # does not look at where experts are (6, 7, 14)
    "swift": {5, 16, 17, 18, 19},               # its moves make other slots spare, so it goes on (15)
    "random": {5, 15, 17, 19},                  # does not look at loads
}
FREE = Params(max_move_frac=10, bytes_per_expert=0)


def having(number):
    return pytest.mark.parametrize("policy", sorted(p for p in HOLDS if number in HOLDS[p]))


def run(policy, window, now, params=FREE):
    new = policies.load(policy)(window, now, Topology.regular(now.ranks, ranks_per_node=2), params)
    assert new.check(window.experts) == []
    assert new.phys_to_log.shape == now.phys_to_log.shape and new.phys_to_log.dtype == np.int32
    np.testing.assert_array_equal(new.phys_to_log < 0, now.phys_to_log < 0)         # holes stay holes
    assert (new.counts(window.experts) <= now.ranks).all()
    return new


def case(seed, name=None):
    """A window of a trace and a valid placement; small, uneven sizes included."""
    rng = np.random.default_rng(seed)
    layers, experts, slots, ranks = some_sizes(rng, 6)
    x = traces.trace(name or traces.names()[seed % 5], steps=24, layers=layers, experts=experts, tokens=60,
                     topk=min(2, experts), seed=seed)
    return LoadWindow.of(x), some_placement(rng, layers, experts, slots, ranks)


def test_the_table_names_every_policy():
    assert sorted(HOLDS) == policies.names()
    with pytest.raises(ConfigError, match="did you mean 'flash'"):
        policies.load("flush")


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize("seed", range(20))
def test_placements_are_valid(policy, seed):
    run(policy, *case(seed))


@pytest.mark.parametrize("seed", range(8))
def test_hierarchical_greedy_keeps_groups_on_nodes(seed):
    rng = np.random.default_rng(seed)
    now = Placement.initial(2, 16, 24, 4)                                   # two nodes of two ranks
    w = LoadWindow.of(rng.integers(1, 99, (1, 2, 16)))
    new = run("greedy", w, now, attrs.evolve(FREE, groups=4))
    for layer in new.by_rank:
        nodes = [set((layer[r:r + 2] // 4).ravel().tolist()) for r in (0, 2)]
        assert all(len(n) == 2 for n in nodes) and not nodes[0] & nodes[1]


def test_groups_that_do_not_divide_fall_back_to_flat():
    w, now = LoadWindow.of(np.arange(1, 17).reshape(1, 1, 16)), Placement.initial(1, 16, 24, 4)
    assert run("greedy", w, now, attrs.evolve(FREE, groups=3)) == run("greedy", w, now)


def test_random_depends_on_its_seed_only():
    w, now = case(3)
    a, b = (run("random", w, now, attrs.evolve(FREE, seed=s)) for s in (1, 2))
    assert a != b and a == run("random", w, now, attrs.evolve(FREE, seed=1))


def test_swift_exchanges_once_per_pair_of_ranks():
    held = np.zeros((2, 8), bool)
    held[0, :4] = held[1, 4:] = True
    swift._exchange(np.array([10.0, 6, 5, 4, 0, 0, 0, 0]), held, np.zeros_like(held), np.zeros((2, 2), int))
    assert held[0].tolist() == [False, True, True, True, True, False, False, False]     # 15 and 10; 14 and 11 with two


def test_the_sheets_instance():
    """w = [90, 132, 40, 61, 104, 165] on 3 ranks of 3 slots: all policies that balance reach 1.016."""
    w, now = LoadWindow.of(np.array([[[90, 132, 40, 61, 104, 165]]])), Placement.initial(1, 6, 9, 3)
    for policy, most_moves in (("greedy", 9), ("swift", 2), ("flash", 4), ("afl", 2)):
        new = run(policy, w, now)
        assert round(float(metrics.par(metrics.rank_loads(w.total, new))[0]), 3) == 1.016
        assert metrics.moves(now, new) <= most_moves


@pytest.mark.parametrize("policy", ["flash", "afl"])
def test_no_renaming_of_ranks_would_save_moves(policy):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        now = some_placement(rng, 1, 12, 16, 4)
        new = run(policy, LoadWindow.of(rng.integers(1, 99, (9, 1, 12)) ** 2), now)
        named = [metrics.moves(now, Placement(new.by_rank[:, list(p)].reshape(1, -1), 4))
                 for p in permutations(range(4))]
        assert metrics.moves(now, new) == min(named)


# 5, 6, 7


@having(5)
@pytest.mark.parametrize("seed", range(10))
def test_experts_that_stay_on_a_rank_keep_their_slot(policy, seed):
    w, now = case(seed)
    new = run(policy, w, now)
    for old_row, new_row in zip(now.by_rank.reshape(-1, now.slots_per_rank), new.by_rank.reshape(
            -1, now.slots_per_rank), strict=True):
        for s, e in enumerate(old_row.tolist()):
            if e in new_row:
                assert new_row[s] == e


@having(6)
@pytest.mark.parametrize("seed", range(12))
def test_pinned_slots_stay(policy, seed):
    w, now = case(seed)
    rng = np.random.default_rng(seed)
    pinned = {(int(a), int(r), int(s)) for a, r, s in np.argwhere(rng.random(now.by_rank.shape) < 0.4)}
    new = run(policy, w, now, attrs.evolve(FREE, gate=0, tol=0, pinned=pinned))
    for place in pinned:
        assert new.by_rank[place] == now.by_rank[place]


@having(7)
@pytest.mark.parametrize("frac", [0, 0.05, 0.1, 0.25, 0.5])
def test_moves_stay_within_the_budget_of_each_layer(policy, frac):
    moved = 0
    for seed in range(15):
        w, now = case(seed)
        new = run(policy, w, now, attrs.evolve(FREE, gate=0, tol=0, max_move_frac=frac))
        for layer in range(now.layers):
            one = metrics.moves(*(Placement(p.phys_to_log[layer:layer + 1], p.ranks) for p in (now, new)))
            assert one <= frac * (now.phys_to_log[layer] >= 0).sum()
            moved += one
    assert (moved > 0) == (frac > 0)


# 14, 15, 16, 17


@having(14)
@pytest.mark.parametrize("gate", [0.0, 0.01, 0.2])
def test_a_layer_changes_only_for_a_peak_smaller_by_the_gate(policy, gate):
    changed = 0
    for seed in range(15):
        w, now = case(seed)
        new = run(policy, w, now, attrs.evolve(FREE, z=0, forecaster="mean", tol=0, gate=gate))
        before, after = (metrics.par(metrics.rank_loads(w.total, p)) for p in (now, new))
        for layer in range(now.layers):
            if (new.phys_to_log[layer] != now.phys_to_log[layer]).any():
                changed += 1
                assert after[layer] < before[layer] - gate
    assert changed > 3


@having(15)
@pytest.mark.parametrize("seed", [*range(12), 15, 140, 253])               # the last three take more than one search
def test_planning_again_with_the_same_loads_changes_nothing(policy, seed):
    w, now = case(seed)
    once = run(policy, w, now, Params(max_move_frac=10))
    assert run(policy, w, once, Params(max_move_frac=10)) == once


@having(16)
def test_without_load_or_with_perfect_balance_nothing_moves(policy):
    now = Placement.initial(2, 8, 12, 4)
    x = np.zeros((10, 2, 8), int)
    assert run(policy, LoadWindow.of(x), now) == now
    assert run(policy, LoadWindow.empty(2, 8), now) == now
    x[:, 1] = np.arange(1, 9)
    new = run(policy, LoadWindow.of(x), now)
    np.testing.assert_array_equal(new.phys_to_log[0], now.phys_to_log[0])           # the layer without load
    assert (new.phys_to_log[1] != now.phys_to_log[1]).any()
    even = Placement.initial(1, 8, 8, 4)
    if policy != "greedy":                                                  # which packs anew whatever the balance
        assert run(policy, LoadWindow.of(np.full((10, 1, 8), 7)), even) == even


@having(17)
def test_one_rank_never_changes(policy):
    now = Placement([[2, 0, 1, -1]], 1)
    assert run(policy, LoadWindow.of(np.array([[[5, 1, 9]]])), now) == now


# 18, 19


@having(18)
@pytest.mark.parametrize("seed", range(8))
def test_the_names_of_experts_do_not_matter(policy, seed):
    rng = np.random.default_rng(seed)
    now = some_placement(rng, 1, 12, 16, 4)
    x = rng.permutation(np.arange(12)) ** 2 * 17 + rng.integers(0, 40, (40, 1, 12)) + rng.integers(1, 9, 12)
    name = rng.permutation(12)
    y = np.empty_like(x)
    y[:, :, name] = x
    a = run(policy, LoadWindow.of(x), now)
    b = run(policy, LoadWindow.of(y), Placement(name[now.phys_to_log], 4))
    if policy == "afl":
        np.testing.assert_array_equal(name[a.phys_to_log], b.phys_to_log)
    held = [[sorted(name[r].tolist()) for r in a.by_rank[0]], [sorted(r.tolist()) for r in b.by_rank[0]]]
    assert held[0] == held[1]


@having(19)
@pytest.mark.parametrize("factor", [2, 3, 1000])
def test_the_unit_of_loads_does_not_matter(policy, factor):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        now, x = some_placement(rng, 2, 12, 16, 4), rng.integers(100, 9000, (30, 2, 12))
        assert run(policy, LoadWindow.of(x), now) == run(policy, LoadWindow.of(x * factor), now)


# 23


@having(23)
def test_tiny_instances_are_near_the_optimum(policy):
    rng, ratio = np.random.default_rng(0), []
    while len(ratio) < 150:
        ranks, experts = int(rng.integers(2, 4)), int(rng.integers(3, 7))
        slots = ranks * int(rng.integers(-(-experts // ranks), min(experts, 4) + 1)) - int(rng.integers(0, 2))
        if not experts <= slots <= 9:
            continue
        load = rng.integers(1, 40, experts) if len(ratio) % 2 else (rng.pareto(1.2, experts) * 10 + 1).astype(int)
        new = run(policy, LoadWindow.of(load[None, None]), Placement.initial(1, experts, slots, ranks),
                  attrs.evolve(FREE, tol=0, gate=0))
        best = best_peak(load.astype(float), slots, ranks)
        ratio.append(metrics.rank_loads(load[None], new).max() / best)
        assert ratio[-1] >= 1 - 1e-9
    assert max(ratio) <= 4 / 3 and np.mean(ratio) <= 1.02


# sizes and bad input


@pytest.mark.parametrize("policy", policies.names())
def test_one_expert_and_as_many_replicas_as_ranks(policy):
    for now in (Placement.initial(1, 1, 1, 1), Placement.initial(1, 1, 3, 3)):
        assert run(policy, LoadWindow.of(np.array([[[7]]])), now) == now


@pytest.mark.parametrize("policy", ["afl", "greedy"])
def test_ten_thousand_experts(policy):
    rng = np.random.default_rng(0)
    w = LoadWindow.of(rng.integers(0, 99, (2, 1, 10_000)))
    now = Placement.initial(1, 10_000, 10_240, 64)
    new = run(policy, w, now, Params(z=0, max_move_frac=0.01))
    assert metrics.par(metrics.rank_loads(w.total, new)) <= metrics.par(metrics.rank_loads(w.total, now))


@pytest.mark.parametrize("policy", policies.names())
def test_values_that_do_not_belong_together_are_refused_with_all_reasons(policy):
    w, now, topology = LoadWindow.of(np.ones((1, 2, 6), int)), Placement.initial(2, 6, 8, 2), Topology.regular(2)
    call = policies.load(policy)
    with pytest.raises(BalanceError, match=r"3 problems(.|\n)*layers(.|\n)*ranks(.|\n)*more experts than slots"):
        call(LoadWindow.of(np.ones((1, 3, 9), int)), now, Topology.regular(3), FREE)
    with pytest.raises(BalanceError, match="holds expert 0 2 times"):
        call(w, Placement([[0, 0, 1, 2, 3, 4, 5, 1]] * 2, 2), topology, FREE)
    with pytest.raises(BalanceError, match=r"pinned slot \(0, 2, 0\)"):
        call(w, now, topology, attrs.evolve(FREE, pinned={(0, 2, 0)}))
