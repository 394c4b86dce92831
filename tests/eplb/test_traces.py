"""Traces have the statistics they promise; metrics agree with plain loops."""

import numpy as np
import pytest
from arrangements import some_placement, some_sizes
from brute import best_peak

from afl.dist.eplb import metrics, traces
from afl.dist.eplb.values import Placement
from afl.errors import BalanceError


@pytest.mark.parametrize("name", traces.names())
def test_a_trace_is_seeded_and_hands_out_every_assignment(name):
    kw = {"steps": 5, "layers": 3, "experts": 20, "tokens": 50, "topk": 4}
    a, b = traces.trace(name, **kw), traces.trace(name, **kw)
    assert a.shape == (5, 3, 20) and (a == b).all() and (a.sum(2) == 200).all()
    assert (traces.trace(name, seed=1, **kw) != a).any()


def test_no_expert_gets_more_than_one_choice_of_a_token():
    p = traces.cap(np.array([[1e9, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]), 0.5)
    np.testing.assert_allclose(p, [[0.5, 0.125, 0.125, 0.25], [0.25] * 4])
    np.testing.assert_allclose(traces.cap(np.array([[8.0, 6.0, 1.0, 1.0]]), 1 / 3), [[1 / 3, 1 / 3, 1 / 6, 1 / 6]])


def test_traces_have_the_statistics_of_their_definition():
    kw = {"steps": 400, "layers": 4, "experts": 128, "tokens": 4000, "topk": 2}
    z = np.sort(traces.trace("zipf", **kw).sum(0), 1)[:, ::-1]
    np.testing.assert_allclose(z[:, 0] / z[:, 15], 16**0.8, rtol=0.05)
    flat = np.log(traces.trace("flat", **kw).sum(0))
    assert 0.15 < flat.std() < 0.25
    x = traces.trace("lognormal", **kw)
    big = x.mean(0) > 60
    noise = x.std(0)[big] / x.mean(0)[big]
    assert 0.4 < np.median(noise) < 0.6                                     # Gamma(4, 1/4): 0.5
    d = np.log(traces.trace("drift", **(kw | {"steps": 1200})) + 0.5)
    assert 0.8 < d[0].std() < 1.25 and 0.15 < np.corrcoef(d[0].ravel(), d[-1].ravel())[0, 1] < 0.6      # exp(-1)
    b = traces.trace("bursty", **(kw | {"steps": 1200}))
    top = np.corrcoef(b[:, 0].T)
    assert 0.03 < ((top > 0.6).sum() - 128) / (128 * 127) < 0.09            # 7 of 127 others share a topic


def test_unknown_traces_and_topk_are_refused():
    with pytest.raises(BalanceError, match="zipf"):
        traces.trace("zipff", steps=1, layers=1, experts=4, tokens=1)
    with pytest.raises(BalanceError, match="topk"):
        traces.trace("zipf", steps=1, layers=1, experts=4, tokens=1, topk=5)


@pytest.mark.parametrize("seed", range(12))
def test_metrics_agree_with_loops(seed):
    rng = np.random.default_rng(seed)
    layers, experts, slots, ranks = some_sizes(rng)
    a, b = (some_placement(rng, layers, experts, slots, ranks) for _ in range(2))
    x = rng.integers(0, 50, (4, layers, experts))
    loads, moved = np.zeros((4, layers, ranks)), 0
    for layer in range(layers):
        for r in range(ranks):
            mine = [e for e in a.by_rank[layer, r].tolist() if e >= 0]
            moved += len(set(b.by_rank[layer, r].tolist()) - {-1} - set(mine))
            for e in mine:
                loads[:, layer, r] += x[:, layer, e] / (a.phys_to_log[layer] == e).sum()
    np.testing.assert_allclose(metrics.rank_loads(x, a), loads, atol=1e-9)
    np.testing.assert_allclose(metrics.rank_loads(x, a).sum(2), x.sum(2))       # nothing is lost
    np.testing.assert_allclose(metrics.window_par(x, a), metrics.par(loads.sum(0)))
    np.testing.assert_allclose(metrics.step_par(x, a), metrics.par(loads).mean(0))
    assert metrics.moves(a, b) == moved and metrics.moves(a, a) == 0


def test_changing_the_placement_does_not_change_logical_totals():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 50, (4, 2, 9))
    for _ in range(5):
        p = some_placement(rng, 2, 9, 14, 4)
        np.testing.assert_allclose(metrics.rank_loads(x, p).sum(2), x.sum(2))


@pytest.mark.parametrize("seed", range(20))
def test_the_lower_bound_is_one_and_falls_with_redundancy(seed):
    rng = np.random.default_rng(seed)
    load = (rng.pareto(1.0, 5) * 10 + 1).round()
    bounds = [metrics.lower_bound(load, slots, 3) for slots in (6, 7, 8, 9)]
    assert bounds == sorted(bounds, reverse=True)
    for slots, bound in zip((6, 7, 8, 9), bounds, strict=True):
        assert best_peak(load, slots, 3) * 3 / load.sum() >= bound - 1e-12
    assert metrics.lower_bound(np.zeros(5), 6, 3) == 1.0


def test_par_of_nothing_is_one():
    assert metrics.window_par(np.zeros((1, 1, 3)), Placement([[0, 1, 2]], 3)).tolist() == [1.0]
