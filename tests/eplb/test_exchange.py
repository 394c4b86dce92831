"""The local search: its sums stay true, its predictions come true, and what afl accepts is worth it."""

import inspect

import attrs
import numpy as np
import pytest
from arrangements import some_placement

from afl.dist.eplb import exchange, metrics, policies, traces
from afl.dist.eplb.exchange import recount, refill, tally
from afl.dist.eplb.forecast import choose
from afl.dist.eplb.loops import pack_risk
from afl.dist.eplb.policies import afl
from afl.dist.eplb.policies.afl import Search, detrended, grid, keep_names, price_of_move, scenarios
from afl.dist.eplb.problem import held_of, relabel, settle
from afl.dist.eplb.values import Links, LoadWindow, Params, Placement, Topology

AFL = policies.load("afl")


def layer(seed, experts=10, slots=16, ranks=4):
    """Slots of a valid layer, mean [experts] and covariance [experts, experts] of loads."""
    rng = np.random.default_rng(seed)
    now = some_placement(rng, 1, experts, slots, ranks).by_rank[0]
    x = rng.gamma(2, 1, (30, experts)) * np.exp(rng.standard_normal(experts))
    return now, x.mean(0), np.cov(x.T)


def risks(slot, mean, cov, z):
    """Mean + z standard deviations of each rank's load, from the definition."""
    count = np.bincount(slot[slot >= 0], minlength=len(mean))
    share = np.array([[(row == e).sum() / count[e] for e in range(len(mean))] for row in slot])
    return share @ mean + z * np.sqrt(np.einsum("re,ef,rf->r", share, cov, share))


def searched(seed, z, price=0.0, budget=100, fixed=None, target=None, **sizes):
    now, mean, cov = layer(seed, **sizes)
    home = held_of(now, len(mean))
    s = Search(now, home, home.sum(0), mean, cov, z)
    value = s.run(np.zeros(now.shape, bool) if fixed is None else fixed, home.sum(0) if target is None else target,
                  price, budget)
    return now, mean, cov, s, value


@pytest.mark.parametrize("z", [0.0, 0.67, 2.0])
@pytest.mark.parametrize("seed", range(8))
def test_sums_and_value_are_those_of_the_definition(seed, z):
    now, mean, cov, s, value = searched(seed, z, price=0.002, slots=15 + seed % 2)
    count = np.bincount(s.slot[s.slot >= 0], minlength=len(mean))
    np.testing.assert_array_equal(s.count, count)
    np.testing.assert_array_equal(s.held, held_of(s.slot, len(mean)))
    r = risks(s.slot, mean, cov, z)
    assert s.peak() == pytest.approx(r.max() * len(now) / mean.sum())
    moves = (s.held & ~held_of(now, len(mean))).sum()
    assert value == pytest.approx(s.peak() + 0.002 * moves)
    assert value <= risks(now, mean, cov, z).max() * len(now) / mean.sum() + 1e-12
    part, joint, mu, var = (np.zeros_like(a) for a in s.sums)
    tally(s.slot, s.count, mean, cov, z, part, joint, mu, var)
    for kept, anew in zip(s.sums, (part, joint, mu, var), strict=True):
        np.testing.assert_allclose(kept, anew, atol=1e-9)


@pytest.mark.parametrize("z", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(40))
def test_no_exchange_of_the_riskiest_rank_is_left_that_would_help(seed, z):
    _, mean, cov, s, _ = searched(seed, z, experts=20, slots=24, ranks=8)
    r = risks(s.slot, mean, cov, z)
    if r.max() <= r.mean() * 1.002:
        return
    hot = int(r.argmax())
    for q in range(len(r)):
        for k in range(s.slot.shape[1]):
            for j in range(s.slot.shape[1]):
                if q != hot and not s.held[q, s.slot[hot, k]] and not s.held[hot, s.slot[q, j]]:
                    t = s.slot.copy()
                    t[hot, k], t[q, j] = s.slot[q, j], s.slot[hot, k]
                    new = risks(t, mean, cov, z)
                    assert max(new[hot], new[q]) >= r[hot] * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_searching_again_from_the_result_finds_nothing(seed):
    _, mean, cov, s, value = searched(seed, 1.0, experts=20, slots=24, ranks=8)
    again = Search(s.slot, s.held, s.count, mean, cov, 1.0)
    assert again.run(np.zeros(s.slot.shape, bool), s.count, 0.0, 100) == pytest.approx(value)
    np.testing.assert_array_equal(again.slot, s.slot)


@pytest.mark.parametrize(("skip", "instead"), [
    (" or max(changed[q], changed[r]) <= scanned[r]", ""), ("x - refund >= least or", "")],
    ids=["unsuccessful pairs", "exchanges that are too small"])
def test_what_is_skipped_would_have_changed_nothing(monkeypatch, skip, instead):
    """The same loop without one of its short cuts."""
    text = inspect.getsource(exchange.exchange)
    assert skip in text
    slow = dict(vars(exchange))
    exec(text.replace(skip, instead), slow)

    def found(seed, z, price):
        now, mean, cov = layer(seed, 20, 24, 8)
        elsewhere = held_of(layer(seed + 100, 20, 24, 8)[0], 20)            # so that many moves can be taken back
        s = Search(now, elsewhere, np.bincount(now.ravel(), minlength=20), mean, cov, z)
        s.held[:] = held_of(now, 20)
        s.run(np.zeros(now.shape, bool), s.count, price, 100)
        return s.slot

    cases = [(seed, z, price) for seed in range(12) for z in (0.0, 1.0) for price in (0.0, 0.03)]
    fast = [found(*c) for c in cases]
    monkeypatch.setattr(afl, "compiled", lambda loop: slow[loop.__name__])
    for c, slot in zip(cases, fast, strict=True):
        np.testing.assert_array_equal(found(*c), slot)


@pytest.mark.parametrize("z", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_recount_finds_the_best_change_of_a_replica(seed, z):
    now, mean, cov = layer(seed)
    home = held_of(now, len(mean))
    s = Search(now, home, home.sum(0), mean, cov, z)
    r = risks(now, mean, cov, z)
    hot = int(r.argmax())
    order = np.argsort(-mean)
    best = np.inf
    for q in range(len(now)):
        for k in range(now.shape[1]):
            for e in np.flatnonzero(~home[q]):
                g = now[q, k]
                if s.count[g] > 1 and (q == hot or home[hot, e]):
                    t = now.copy()
                    t[q, k] = e
                    new = risks(t, mean, cov, z)
                    best = min(best, new[home[:, e] | home[:, g] | (np.arange(len(now)) == q)].max())
    found = recount(s.slot, np.zeros(now.shape, bool), home, s.held, s.count, order, mean, z, 0.0, 9, r, hot, *s.sums)
    if found[1] < 0:
        assert best >= r[hot] * (1 - 1e-6)
    else:
        assert found[0] == pytest.approx(best)
    nothing = recount(s.slot, np.ones(now.shape, bool), home, s.held, s.count, order, mean, z, 0.0, 9, r, hot, *s.sums)
    assert nothing[1] == -1
    still = recount(s.slot, np.zeros(now.shape, bool), home, s.held, s.count, order, mean, z, 0.0, 0, r, hot, *s.sums)
    assert still[1] == -1


@pytest.mark.parametrize("z", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_refilling_reaches_the_replica_numbers_with_one_move_each(seed, z):
    now, mean, cov = layer(seed)
    home = held_of(now, len(mean))
    target = np.ones(10, np.int64)
    target[np.argsort(-mean)[:3]] += 2                                      # 16 = 10 + 6
    for budget in (0, 2, 99):
        s = Search(now, home, home.sum(0), mean, cov, z)
        moves = refill(s.slot, np.zeros(now.shape, bool), home, s.held, s.count, target, mean, cov, z, budget, *s.sums)
        assert moves == (s.held & ~home).sum() == np.maximum(s.count - home.sum(0), 0).sum()
        assert moves <= budget and (s.count >= 1).all() and s.count.sum() == 16
        assert s.peak() == pytest.approx(risks(s.slot, mean, cov, z).max() * 4 / mean.sum())
        missing = np.maximum(target - s.count, 0).sum()
        assert missing <= 1 or moves == budget                              # one may find no rank that lacks it


def test_refilling_takes_the_least_risky_rank():
    now = np.array([[0, 1], [2, 1], [3, 1]])
    mean, cov = np.array([9.0, 3.0, 5.0, 1.0]), np.zeros((4, 4))
    home = held_of(now, 4)
    s = Search(now, home, home.sum(0), mean, cov, 0.0)
    refill(s.slot, np.zeros(now.shape, bool), home, s.held, s.count, np.array([2, 1, 2, 1]), mean, cov, 0.0, 9, *s.sums)
    assert s.slot.tolist() == [[0, 2], [2, 1], [3, 0]]              # 0 goes to the lightest, then 2 where it may


def test_a_higher_price_makes_fewer_moves():
    def moved(price):
        return sum((s.held & ~held_of(now, 10)).sum() for now, _, _, s, _ in
                   (searched(seed, 0.67, price) for seed in range(12)))

    assert moved(0.0) > moved(0.005) > moved(0.05) > 0 == moved(10.0)


def test_the_price_is_link_time_over_expert_time():
    p = Params(bytes_per_expert=1000, step_seconds=0.1, horizon_steps=100, expert_share=0.5)
    now = Placement.initial(5, 8, 8, 4)
    near = Topology(4, [0] * 4, [0] * 4, Links(400.0, 200.0, 100.0))
    far = attrs.evolve(near, node=[0, 0, 1, 1])
    assert price_of_move(now, near, p) == pytest.approx(1000 / 200 / 4 / (100 * 0.1 * 0.5 / 5))
    assert price_of_move(now, far, p) == pytest.approx(2 * price_of_move(now, near, p))
    assert price_of_move(now, near, attrs.evolve(p, horizon_steps=0)) == 1e9


def test_ranks_are_renamed_when_that_saves_moves_unless_slots_are_pinned():
    now, mean, cov = layer(3)
    home = held_of(now, len(mean))
    s = Search(now, home, home.sum(0), mean, cov, 0.0)
    s.held[:] = home[[1, 2, 3, 0]]
    np.testing.assert_array_equal(keep_names(s, now, np.zeros(now.shape, bool)), now)
    pinned = np.zeros(now.shape, bool)
    pinned[0, 0] = True
    np.testing.assert_array_equal(held_of(keep_names(s, now, pinned), 10), home[[1, 2, 3, 0]])


def test_renaming_never_moves_more_and_keeps_holes():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = (some_placement(rng, 1, 9, 14, 4).by_rank[0] for _ in range(2))
        old, new = held_of(a, 9), held_of(b, 9)
        named = relabel(new, a)
        assert sorted(map(tuple, named.tolist())) == sorted(map(tuple, new.tolist()))
        assert (named & old).sum() >= (new & old).sum()
        np.testing.assert_array_equal(settle(named, a) < 0, a < 0)


def test_fluctuations_lose_slow_changes_and_keep_fast_ones():
    t = np.arange(64.0)
    slow, fast = t / 10, np.where(t % 2 == 0, 1.0, -1.0)
    x = detrended(np.stack([slow, slow + fast], 1))
    assert np.abs(x[8:-8, 0]).max() < 1e-9 and np.std(x[8:-8, 1]) == pytest.approx(1, abs=0.1)
    assert not detrended(np.ones((1, 3))).any()


def test_scenarios_spread_by_the_error_and_repeat():
    mean, error = np.array([1.0, 5.0, 2.0]), np.array([0.0, 0.2, 0.1])
    y = scenarios(np.zeros((64, 3)), mean, error)
    assert (y[:, 0] == 1).all() and y[:, 1].std() == pytest.approx(1.0, rel=0.3)
    np.testing.assert_array_equal(y, scenarios(np.zeros((64, 3)), mean, error))
    name = np.array([2, 0, 1])
    np.testing.assert_array_equal(y[:, name], scenarios(np.zeros((64, 3)), mean[name], error[name]))
    assert (scenarios(np.full((9, 3), -9.0), mean, error) == 0).all()


def test_the_grid_forgets_rounding_only():
    x = np.array([0.1, 1.0, 3.0])
    np.testing.assert_array_equal(grid(x * (1 + 1e-13)), grid(x))
    assert np.abs(grid(x) - x).max() < 1e-9 and (grid(x) != grid(x + 1e-8)).all()


# what afl accepts


def two_windows(name, seed, ranks=8, experts=64, layers=4):
    x = traces.trace(name, steps=400, layers=layers, experts=experts, tokens=8000, topk=4, seed=seed)
    return LoadWindow.of(x[:200]), LoadWindow.of(x[200:]), Placement.initial(layers, experts, experts + ranks, ranks)


@pytest.mark.parametrize("name", ["zipf", "flat"])
def test_a_second_plan_of_a_steady_load_moves_nothing(name):
    for seed in range(4):
        first, second, now = two_windows(name, seed)
        p = Params(max_move_frac=1.0, horizon_steps=200)
        once = AFL(first, now, Topology.regular(8), p)
        assert metrics.moves(now, once) > 0
        assert metrics.moves(once, AFL(second, once, Topology.regular(8), p)) == 0


def test_gains_below_two_standard_errors_are_not_taken(monkeypatch):
    p = Params(max_move_frac=1.0, gate=0, tol=0, bytes_per_expert=0, forecaster="mean", z=0)
    now, taken = Placement.initial(1, 16, 18, 6), {-1e9: 0, 2.0: 0}
    for errors in taken:
        monkeypatch.setattr(afl, "ERRORS", errors)
        for seed in range(30):
            rng = np.random.default_rng(seed)
            x = rng.poisson(rng.gamma(0.5, 200, (12, 1, 16)))               # as uncertain as loads can be
            new = AFL(LoadWindow.of(x), now, Topology.regular(6), p)
            if new == now:
                continue
            taken[errors] += 1
            unit = grid(x[:, 0] / x.mean())
            rows = scenarios(detrended(unit), grid(unit.mean(0)), grid(choose(unit, 9, "mean")[1][1]))
            gain = np.subtract(*(metrics.par(metrics.rank_loads(rows[:, None], q))[:, 0] for q in (now, new)))
            if errors > 0:                                                  # its last step alone has passed the gate
                assert gain.mean() > gain.std() / np.sqrt(len(gain) - 1)
    assert 0 < taken[2.0] < taken[-1e9]


def test_experts_that_burst_together_are_parted_by_risk_and_not_by_means():
    rng = np.random.default_rng(0)
    on = rng.random((60, 1)) < 0.3
    x = np.full((60, 1, 8), 100)
    x[:, :, :2] = np.where(on, 240, 40)[:, :, None]                         # the same mean, on average
    x = rng.poisson(x)
    now = Placement([[0, 1, 2, 3, 4, 5, 6, 7]], 4)
    p = Params(max_move_frac=1.0, bytes_per_expert=0, forecaster="mean")
    with_risk = AFL(LoadWindow.of(x), now, Topology.regular(4), p)
    assert not set(with_risk.holders(0, 0)) & set(with_risk.holders(0, 1))
    flash = policies.load("flash")(LoadWindow.of(x), now, Topology.regular(4), attrs.evolve(p, z=2.0))
    assert not set(flash.holders(0, 0)) & set(flash.holders(0, 1))


def test_packing_by_risk_parts_experts_that_vary_together():
    mean, cov = np.array([4.0, 4.01, 3.0, 3.0]), np.eye(4)
    cov[0, 2] = cov[2, 0] = 0.9
    for z, mates in ((1.0, {1, 2}), (0.0, {0, 2})):
        held = np.zeros((2, 4), bool)
        assert pack_risk(np.array([1, 0, 2, 3]), mean, cov, np.ones(4, np.int64), z, np.array([2, 2]), held)
        assert mates in [set(np.flatnonzero(row).tolist()) for row in held]


@pytest.mark.parametrize("name", ["drift", "bursty"])
def test_afl_is_ahead_of_flash_with_fewer_moves(name):
    figure = metrics.step_par if name == "bursty" else metrics.window_par
    total, moved = {"afl": 0.0, "flash": 0.0}, {"afl": 0, "flash": 0}
    for seed in range(4):
        x = traces.trace(name, steps=400, layers=4, experts=64, tokens=1000, topk=4, seed=seed)
        now = Placement.initial(4, 64, 72, 8)
        for policy in total:
            new = policies.load(policy)(LoadWindow.of(x[:200]), now, Topology.regular(8),
                                        Params(max_move_frac=1.0, horizon_steps=200))
            total[policy] += figure(x[200:], new).mean() - 1
            moved[policy] += metrics.moves(now, new)
    assert total["afl"] < total["flash"] and moved["afl"] < 0.8 * moved["flash"]
