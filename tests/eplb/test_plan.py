"""Plans of every policy: valid on the way, stable where nothing changes, and worth what they say."""

from pathlib import Path

import attrs
import numpy as np
import pytest
from arrangements import some_placement, some_sizes, some_topology
from invariants import ROWS
from replay import replay

from afl.dist.eplb import policies
from afl.dist.eplb.explain import explain
from afl.dist.eplb.metrics import par, rank_loads
from afl.dist.eplb.plan import faults, plan
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology
from afl.errors import BalanceError, CheckFailed

POLICIES = policies.names()


def instance(seed):
    rng = np.random.default_rng(seed)
    layers, experts, slots, ranks = some_sizes(rng)
    now = some_placement(rng, layers, experts, slots, ranks)
    counts = rng.poisson(rng.lognormal(4, 1.2, (layers, experts)), (12, layers, experts))
    params = Params(staging=int(rng.integers(0, 3)), bytes_per_expert=int(rng.integers(1, 1 << 26)))
    return LoadWindow.of(counts), now, some_topology(rng, ranks), params


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policys_plans_are_valid_on_the_way_and_keep_slots(policy):
    for seed in range(25):
        window, now, topology, params = instance(seed)
        p = plan(window, now, topology, params, policy)
        assert faults(p, now, window.experts) == []
        assert replay(now, p, window.experts, params.staging) == p.placement
        assert p.placement.phys_to_log.shape == now.phys_to_log.shape and p.placement.phys_to_log.dtype == np.int32
        count = p.placement.counts(window.experts)
        assert (count >= 1).all() and (count <= now.ranks).all()
        assert (count.sum(1) == (now.phys_to_log >= 0).sum(1)).all()
        for before, after in zip(now.by_rank.reshape(-1, now.slots_per_rank),
                                 p.placement.by_rank.reshape(-1, now.slots_per_rank), strict=True):
            for e in set(before.tolist()) & set(after.tolist()) - {-1}:
                assert before.tolist().index(e) == after.tolist().index(e)
        assert p.bytes == params.bytes_per_expert * (now.phys_to_log != p.placement.phys_to_log).sum()
        assert len(p.reasons) == now.layers and (p.par_after >= 1 - 1e-9).all()


def table():
    """(row, policy) for every yes of the table in docs/eplb.md."""
    lines = (Path(__file__).parents[2] / "docs/eplb.md").read_text().splitlines()
    start = next(i for i, x in enumerate(lines) if x.startswith("| | afl |"))
    head = [c.strip() for c in lines[start].strip("|").split("|")]
    for line in lines[start + 2:]:
        if not line.startswith("|"):
            return
        row = [c.strip() for c in line.strip("|").split("|")]
        yield from ((row[0], head[i]) for i, c in enumerate(row) if i and c == "yes")


def test_the_table_of_the_page_lists_every_policy():
    found = list(table())
    assert {p for _, p in found} == set(POLICIES) and len(found) > 15


@pytest.mark.parametrize(("row", "policy"), list(table()))
def test_what_the_page_says_of_a_policy_holds(row, policy):
    for seed in range(30):
        assert ROWS[row](instance(seed), policy), seed


@pytest.mark.parametrize("policy", POLICIES)
def test_one_rank_and_no_load_change_nothing(policy):
    window = LoadWindow.of(np.random.default_rng(0).integers(0, 99, (4, 2, 5)))
    alone = Placement.initial(2, 5, 5, 1)
    p = plan(window, alone, Topology.regular(1), policy=policy)
    assert p.placement == alone and p.rounds == () and p.gain_seconds == 0
    if policy != "random":
        now = Placement.initial(2, 6, 9, 3)
        p = plan(LoadWindow.of(np.zeros((4, 2, 6), int)), now, Topology.regular(3), policy=policy)
        assert p.par_before.tolist() == p.par_after.tolist() == [1, 1] and p.gain_seconds == 0


def test_the_gain_is_the_time_that_the_slowest_ranks_save():
    # one layer: ranks carry 30 and 10, afterwards 20 and 20; half of a step is experts, who wait for the slowest rank
    window, now = LoadWindow.of(np.array([[[20, 10, 5, 5]]])), Placement([[0, 1, 2, 3]], 2)
    params = Params(step_seconds=0.04, expert_share=0.5, horizon_steps=100)
    p = plan(window, now, Topology.regular(2), params, lambda *_: Placement([[2, 1, 0, 3]], 2))
    assert p.par_before.tolist() == [1.5] and p.par_after.tolist() == [1.25]
    assert p.gain_seconds == pytest.approx(100 * 0.04 * 0.5 * (1 - 1.25 / 1.5))


def test_the_most_useful_layer_moves_first():
    counts = np.array([[[10, 10, 11, 9], [90, 80, 1, 1], [50, 20, 10, 10]]])
    now = Placement([[0, 1, 2, 3]] * 3, 2)
    p = plan(LoadWindow.of(counts), now, Topology.regular(2), Params(staging=1),
             lambda *_: Placement([[2, 1, 0, 3]] * 3, 2))
    assert [x for c in p.commits for x in c] == [1, 2, 0]


def test_urgency_follows_the_time_saved_and_not_the_ratio():
    counts = np.array([[[4, 1, 1, 1], [400, 300, 200, 100]]])
    now = Placement([[0, 1, 2, 3]] * 2, 2)
    p = plan(LoadWindow.of(counts), now, Topology.regular(2), Params(staging=1),
             lambda *_: Placement([[0, 3, 2, 1]] * 2, 2))
    assert [x for c in p.commits for x in c] == [1, 0]


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda w, p, t: (w, Placement(p.phys_to_log[:1], p.ranks), t), "2 of loads, 1 of the placement"),
    (lambda w, p, t: (w, p, Topology.regular(4)), "4 of the topology, 3 of the placement"),
    (lambda w, p, t: (LoadWindow.of(np.ones((1, 2, 10), int)), p, t), "only 9 slots"),
    (lambda w, p, t: (w, Placement(np.zeros((2, 9), int), 3), t), "on no rank"),
])
def test_values_that_do_not_fit_are_refused(spoil, said):
    w, p, t = LoadWindow.of(np.ones((1, 2, 6), int)), Placement.initial(2, 6, 9, 3), Topology.regular(3)
    with pytest.raises(BalanceError, match=said):
        plan(*spoil(w, p, t), policy="greedy")


def test_a_policy_that_loses_an_expert_is_caught():
    w, now = LoadWindow.of(np.ones((1, 1, 4), int)), Placement([[0, 1, 2, 3]], 2)
    with pytest.raises(CheckFailed, match="expert"):
        plan(w, now, Topology.regular(2), policy=lambda *_: Placement([[0, 1, 2, 0]], 2))


def test_an_explanation_adds_up():
    rng = np.random.default_rng(3)
    counts = rng.poisson(rng.lognormal(4, 1, (3, 16)), (40, 3, 16))
    window, now, topology = LoadWindow.of(counts), Placement.initial(3, 16, 20, 4), Topology.regular(4)
    p = plan(window, now, topology, policy="greedy")
    whole = 0.0
    for layer in range(3):
        x = explain(window, now, topology, Params(), "greedy", layer)
        assert x.before.par == pytest.approx(p.par_before[layer]) and x.after.par == pytest.approx(p.par_after[layer])
        assert sorted(x.moves) == sorted(t for r in p.rounds for t in r if t.layer == layer)
        for m, e in zip(x.moves, x.replaced, strict=True):
            assert now.by_rank[layer, m.dst_rank, m.dst_slot] == e
        loads = rank_loads(x.forecast[None], Placement(now.phys_to_log[layer:layer + 1], 4))
        assert par(loads)[0] == pytest.approx(x.before.par)
        flat = explain(window, now, topology, Params(z=0), "greedy", layer)
        assert flat.before.risk.max() == pytest.approx(x.before.par), "without risk it is the forecast alone"
        assert (x.before.risk >= flat.before.risk).all()
        whole += x.gain_seconds
    assert whole == pytest.approx(p.gain_seconds), "the layers' gains make the plan's"


def test_changing_the_params_of_costs_does_not_change_what_other_policies_do():
    window, now, topology, params = instance(4)
    a = plan(window, now, topology, params, "greedy")
    b = plan(window, now, topology, attrs.evolve(params, step_seconds=1.0, staging=1), "greedy")
    assert a.placement == b.placement
