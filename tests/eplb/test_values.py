"""Load windows, placements, topologies and parameters: what they derive, and what they refuse."""

import numpy as np
import pytest
from arrangements import some_placement, some_sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from afl.dist.eplb.load import MOST
from afl.dist.eplb.values import Links, LoadWindow, Params, Placement, Topology
from afl.errors import BalanceError


def counts(seed, steps, layers=2, experts=3):
    return np.random.default_rng(seed).integers(0, 50, (steps, layers, experts))


# load windows


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 60), st.integers(1, 7), st.integers(1, 12), st.integers(0, 20), st.data())
def test_merging_is_folding_the_concatenation(seed, steps, block, capacity, start, data):
    x, cut = counts(seed, steps), data.draw(st.integers(0, steps))
    kw = {"block_steps": block, "capacity": capacity, "half_life": 5.0}
    whole = LoadWindow.empty(2, 3, start=start, **kw).fold(x)
    first = LoadWindow.empty(2, 3, start=start, **kw).fold(x[:cut])
    merged = first.merge(LoadWindow.empty(2, 3, start=first.end, **kw).fold(x[cut:]))
    one_by_one = LoadWindow.empty(2, 3, start=start, **kw)
    for row in x:
        one_by_one = one_by_one.fold(row)
    for w in (merged, one_by_one):
        assert (w.steps, w.start, w.end) == (steps, start, start + steps)
        np.testing.assert_array_equal(w.total, x.sum(0))
        assert len(w.blocks) == len(whole.blocks) <= capacity
        np.testing.assert_array_equal(w.blocks, whole.blocks)
        np.testing.assert_allclose(w.ewma, whole.ewma, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 60), st.integers(1, 7), st.integers(0, 20))
def test_blocks_begin_at_multiples_of_the_agreed_step(seed, steps, block, start):
    x = counts(seed, steps)
    w = LoadWindow.empty(2, 3, start=start, block_steps=block, capacity=100).fold(x)
    number = np.arange(start, start + steps) // block
    expected = [x[number == n] for n in np.unique(number)]
    np.testing.assert_array_equal(w.block_sizes(), [len(e) for e in expected])
    np.testing.assert_array_equal(w.blocks, [e.sum(0) for e in expected])
    whole = [e.mean(0) for e in expected if len(e) == block]
    np.testing.assert_allclose(w.samples(), whole or [e.mean(0) for e in expected])


def test_the_moving_average_weighs_by_age():
    x = counts(1, 7)
    w = LoadWindow.empty(2, 3, half_life=2.0).fold(x)
    weight = 0.5 ** (np.arange(6, -1, -1) / 2)
    np.testing.assert_allclose(w.ewma, np.tensordot(weight, x, 1) / weight.sum())
    assert not LoadWindow.empty(2, 3).ewma.any()


def test_folding_leaves_the_old_window_alone_and_results_are_read_only():
    a = LoadWindow.empty(2, 3, block_steps=4).fold(counts(0, 2))
    before = a.blocks[0].copy(), a.total.copy()
    b = a.fold(counts(1, 1))
    np.testing.assert_array_equal(a.blocks[0], before[0])
    np.testing.assert_array_equal(a.total, before[1])
    with pytest.raises(ValueError):
        b.blocks[0][0, 0] = 1
    assert a.fold(np.zeros((0, 2, 3), int)) is a


def test_a_recorded_window_keeps_every_step_in_at_most_64_blocks():
    for steps in (1, 63, 64, 65, 600):
        w = LoadWindow.of(counts(0, steps))
        assert len(w.blocks) <= 64 and w.block_sizes().sum() == steps


@pytest.mark.parametrize(("bad", "said"), [
    (np.array([[[1.0, np.nan, 2]]]), "not finite"), (np.array([[[1.0, np.inf, 2]]]), "not finite"),
    (np.array([[[1, -1, 2]]]), "negative"), (np.array([[[0.5, 1, 2]]]), "whole"),
    (np.array([[[MOST + 1, 1, 2]]]), "above"), (np.array(["a"]), "numbers"), (np.zeros(3), "numbers"),
    (np.zeros((1, 1, 1, 3)), "numbers"), (np.zeros((1, 0, 3)), "layers"), (np.zeros((1, 2, 0)), "experts"),
    (np.array([[[1 + 2j]]]), "numbers"), (None, "numbers"),
])
def test_loads_that_are_none_are_refused(bad, said):
    with pytest.raises(BalanceError, match=said):
        LoadWindow.of(bad)


def test_everything_wrong_with_loads_is_said_at_once_with_its_place():
    x = counts(0, 3).astype(float)
    x[1, 0, 2], x[2, 1, 1], x[0, 1, 0] = np.nan, -4, 0.5
    with pytest.raises(BalanceError) as e:
        LoadWindow.empty(2, 4).fold(x)
    text = str(e.value)
    for part in ("experts: got 3, expected 4", "step 1, layer 0, expert 2", "step 2, layer 1, expert 1: -4.0",
                 "step 0, layer 1, expert 0: 0.5"):
        assert part in text


def test_windows_that_do_not_follow_each_other_are_not_merged():
    a = LoadWindow.empty(2, 3).fold(counts(0, 4))
    with pytest.raises(BalanceError, match="first step: got 0, expected 4"):
        a.merge(LoadWindow.empty(2, 3).fold(counts(0, 1)))
    with pytest.raises(BalanceError, match="block_steps"):
        a.merge(LoadWindow.empty(2, 3, start=4, block_steps=2))


def test_sizes_of_windows_are_checked():
    with pytest.raises(BalanceError) as e:
        LoadWindow.empty(0, 0, block_steps=0, capacity=0, half_life=0)
    assert str(e.value).count("must be") == 5


# placements


@pytest.mark.parametrize("seed", range(30))
def test_derived_tables_agree_with_the_slots(seed):
    rng = np.random.default_rng(seed)
    layers, experts, slots, ranks = some_sizes(rng)
    p = some_placement(rng, layers, experts, slots, ranks)
    assert p.check(experts) == [] and p.slots == ranks * p.slots_per_rank
    log_to_phys, n = p.log_to_phys(experts), p.counts(experts)
    assert n.sum() == layers * slots
    for layer in range(layers):
        for e in range(experts):
            at = [s for s in range(p.slots) if p.phys_to_log[layer, s] == e]
            assert log_to_phys[layer, e].tolist() == at + [-1] * (log_to_phys.shape[2] - len(at))
            assert n[layer, e] == len(at) and p.holders(layer, e) == tuple(s // p.slots_per_rank for s in at)


@pytest.mark.parametrize("seed", range(30))
def test_initial_placements_are_valid_and_as_even_as_can_be(seed):
    layers, experts, slots, ranks = some_sizes(np.random.default_rng(seed))
    p = Placement.initial(layers, experts, slots, ranks)
    assert p.check(experts) == []
    held, n = (p.by_rank >= 0).sum(2), p.counts(experts)
    assert held.max() - held.min() <= 1 and held.sum() == layers * slots and n.max() - n.min() <= 1


def test_the_initial_placement_is_that_of_the_checkpoint_loader():
    assert Placement.initial(1, 6, 9, 3).by_rank.tolist() == [[[0, 1, 2], [3, 4, 5], [0, 1, 2]]]


def test_all_violations_are_listed():
    p = Placement([[0, 0, 7, -1, 1, -2], [0, 1, 2, 3, 2, 1]], 2)
    assert p.check(4) == [
        "layer 0, rank 0, slot 2: expert 7 is not in 0..3", "layer 0, rank 1, slot 2: expert -2 is not in 0..3",
        "layer 0: 2 experts are on no rank: 2, 3", "layer 0, rank 0: holds expert 0 2 times"]


def test_placements_are_values():
    a = Placement([[0, 1, 2]], 2)
    assert a.phys_to_log.tolist() == [[0, 1, 2, -1]] and a == Placement([[0, 1, 2, -1]], 2) and hash(a) == hash(
        Placement([[0, 1, 2, -1]], 2))
    assert a != Placement([[0, 1, 2, -1]], 1) and a != Placement([[1, 0, 2, -1]], 2)
    with pytest.raises(ValueError):
        a.phys_to_log[0, 0] = 1
    source = np.array([[0, 1]])
    b = Placement(source, 1)
    source[0, 0] = 5
    assert b.phys_to_log.tolist() == [[0, 1]]


@pytest.mark.parametrize("args", [
    ([0, 1], 1), ([[0.5, 1]], 1), (np.zeros((1, 0), int), 1), ([[0, 1]], 0), ("text", 1)])
def test_placements_that_are_none_are_refused(args):
    with pytest.raises(BalanceError):
        Placement(*args)


@pytest.mark.parametrize(("sizes", "said"), [
    ((1, 8, 6, 2), "cannot hold 8"), ((1, 2, 6, 2), "at most 4 slots"), ((0, 0, 1, 0), "3 problems")])
def test_layouts_that_cannot_be_are_refused(sizes, said):
    with pytest.raises(BalanceError, match=said):
        Placement.initial(*sizes)


# topologies and parameters


def test_links_are_as_fast_as_the_ranks_are_near():
    t = Topology(4, [0, 0, 0, 1], [0, 0, 1, 2], Links(4.0, 2.0, 1.0))
    rates = {(a, b): t.bytes_per_s_between(a, b) for a in range(4) for b in range(4) if a != b}
    assert rates[0, 1] == rates[1, 0] == 4 and rates[1, 2] == 2 and rates[0, 3] == rates[3, 2] == 1


def test_topologies_that_do_not_hold_are_refused():
    with pytest.raises(BalanceError) as e:
        Topology(3, [0, 0], [0, 0, 0, 0], Links(0.0, float("inf"), 1.0))
    assert "4 problems" in str(e.value)


@pytest.mark.parametrize("bad", [{"z": -1}, {"z": float("nan")}, {"max_move_frac": -0.1}, {"groups": 0}, {"tol": -1}])
def test_parameters_out_of_range_are_refused(bad):
    with pytest.raises(BalanceError, match=next(iter(bad))):
        Params(**bad)
