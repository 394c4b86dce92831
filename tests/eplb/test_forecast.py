"""Forecasters against what they must know: steady means, drifting processes, bursts, and which one is chosen."""

import numpy as np
import pytest

from afl.dist.eplb import forecast, traces
from afl.dist.eplb.forecast import FORECASTERS, backtest, blocks, choose, fit, halves, krige, solve, variogram
from afl.dist.eplb.load import LoadWindow
from afl.errors import ConfigError


def rates(name, seed=0, experts=64, steps=600):
    """Block rates [60, experts] of a trace and the mean rates of as many steps after it."""
    x = traces.trace(name, steps=2 * steps, layers=1, experts=experts, tokens=2000, topk=4, seed=seed)
    return blocks(LoadWindow.of(x[:steps]))[0][:, 0], x[steps:, 0].mean(0)


def error(guess, seen):
    return np.abs(guess / guess.sum() - seen / seen.sum()).sum()


@pytest.mark.parametrize(("name", "expected"), [
    ("zipf", {"mean"}), ("flat", {"mean"}), ("lognormal", {"mean"}), ("drift", {"krige"}), ("bursty", {"median"})])
def test_the_back_test_finds_the_forecaster_of_each_trace(name, expected):
    chosen = [choose(rates(name, seed)[0], 60)[0] for seed in range(5)]
    assert sum(c in expected for c in chosen) >= 4


def test_kriging_beats_all_others_on_a_drift():
    total = dict.fromkeys(FORECASTERS, 0.0)
    for seed in range(4):
        x, after = rates("drift", seed)
        for name in FORECASTERS:
            total[name] += error(FORECASTERS[name](x, 60).rate, after)
    assert all(total["krige"] < 0.95 * t for n, t in total.items() if n != "krige")


def test_the_error_of_kriging_is_that_of_its_forecasts():
    ratio = []
    for seed in range(4):
        x, after = rates("drift", seed)
        rate, relative = choose(x, 60, "krige")[1]
        ratio.append(np.std(np.log(after / after.sum()) - np.log(rate / rate.sum())) / relative[0])
    assert 0.7 < np.mean(ratio) < 1.4


def test_the_standard_error_of_the_mean_is_that_of_repeated_windows():
    rng = np.random.default_rng(0)
    x = rng.gamma(4, 25, (200, 50, 3))
    said = np.mean([choose(w, 50, "mean")[1][1] for w in x], 0)
    np.testing.assert_allclose(said, x.mean(1).std(0) / 100, rtol=0.15)


def test_weights_of_the_exponential_forecasts():
    x = np.zeros((40, 2))
    x[-1, 0], x[-11, 1] = 1, 1                                              # 10 blocks = one half-life of ewma4
    a = FORECASTERS["ewma4"](x, 5).rate
    assert a[0] == pytest.approx(2 * a[1]) and FORECASTERS["ewma10"](x, 5).rate[0] > a[0]


def test_the_fit_recovers_noise_drift_and_forgetting():
    rng, m, n = np.random.default_rng(1), 60, 400
    x = np.zeros((m, n))
    x[0] = rng.standard_normal(n)
    for t in range(1, m):
        x[t] = np.exp(-1 / 15) * x[t - 1] + np.sqrt(1 - np.exp(-2 / 15)) * rng.standard_normal(n)
    noise, drift, tau = fit(x + 0.3 * rng.standard_normal((m, n)), np.ones(n), spread=2.0)
    assert noise == pytest.approx(0.09, abs=0.02) and drift == pytest.approx(1, abs=0.15) and 9 < tau < 25


def test_kriging_of_a_steady_load_is_the_mean_and_of_a_walk_the_last_block():
    rng = np.random.default_rng(2)
    steady = np.exp(rng.standard_normal(50)) * (1 + 0.05 * rng.standard_normal((40, 50)))
    np.testing.assert_allclose(krige(steady, 40).rate / steady.mean(0), 1, atol=0.03)
    walk = np.exp(np.cumsum(0.1 * rng.standard_normal((40, 200)), 0))
    rate = krige(walk, 1).rate
    assert np.corrcoef(np.log(rate), np.log(walk[-1]))[0, 1] > 0.98


def test_the_variogram_and_the_solver_agree_with_plain_formulas():
    rng = np.random.default_rng(3)
    y, w = rng.standard_normal((9, 4)), np.array([0.1, 0.2, 0.3, 0.4])
    expected = [(((y[k:] - y[:-k]) ** 2).mean(0) / 2 * w).sum() for k in (1, 2, 3)]
    np.testing.assert_allclose(variogram(y, w, 3), expected)
    a = rng.standard_normal((6, 6))
    a, b = a @ a.T + np.eye(6), rng.standard_normal(6)
    np.testing.assert_allclose(solve(a.copy(), b.copy()), np.linalg.solve(a, b))


def test_blocks_are_the_latest_whole_ones_in_equal_groups():
    x = np.random.default_rng(4).integers(0, 9, (150, 2, 3))
    rows, steps = blocks(LoadWindow.of(x, capacity=150))
    assert rows.shape == (50, 2, 3) and steps == 3
    np.testing.assert_allclose(rows[-1], x[-3:].mean(0))
    rows, steps = blocks(LoadWindow.of(x, capacity=150, block_steps=40))     # three whole ones, ten steps left over
    assert rows.shape == (3, 2, 3) and steps == 40
    np.testing.assert_allclose(rows[-1], x[80:120].mean(0))
    rows, steps = blocks(LoadWindow.of(x[:130], capacity=150))              # 43 groups of three, the first is left out
    assert rows.shape == (43, 2, 3) and steps == 3
    np.testing.assert_allclose(rows[[0, -1]], [x[1:4].mean(0), x[127:130].mean(0)])
    rows, steps = blocks(LoadWindow.of(x[:7], block_steps=40))
    assert rows.shape == (1, 2, 3)


def test_few_blocks_are_forecast_by_their_mean():
    x = np.arange(12.0).reshape(4, 3)
    name, (rate, _) = choose(x, 4)
    assert name == "mean" and rate.tolist() == x.mean(0).tolist()
    assert np.isfinite(choose(x[:1], 1)[1]).all()


def test_unknown_forecasters_get_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'krige'"):
        choose(np.ones((9, 2)), 3, "kriges")


def test_back_tests_are_sums_of_plain_errors():
    x = np.random.default_rng(5).random((16, 5))
    halved = error(x[:8].mean(0), x[8:].mean(0)) + error(x[8:].mean(0), x[:8].mean(0))
    assert halves(x, "mean") == pytest.approx(halved)
    assert backtest(x, "mean") == pytest.approx(sum(error(x[:c].mean(0), x[c:].mean(0)) for c in (8, 10, 12)))
    assert forecast.backtest(np.zeros((16, 3)), "mean") == 0
