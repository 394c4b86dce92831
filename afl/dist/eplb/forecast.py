"""What the experts' loads will be: several forecasters of one layer, and the choice between them by back-test.

A forecaster takes block rates [blocks, experts] and the blocks to look ahead, and gives a `Guess`.  `krige` fits how
fast the logarithms of the rates forget (their variogram) and draws them back to their common mean accordingly; the
others are weighted means and the median.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from afl.dist.eplb.load import LoadWindow
from afl.dist.eplb.loops import compiled
from afl.errors import ConfigError, unknown

SAMPLES = 64        # blocks that forecasts are made from
BETTER = 0.97       # a forecaster replaces the mean only if its error is below this part of the mean's


class Guess(NamedTuple):
    """Expected rates and what their errors come from."""

    rate: np.ndarray            # float64 [experts]
    noise: float                # variance of the rate in units of a block's own noise
    error: float = 0.0          # further relative standard error


def mean(x: np.ndarray, ahead: int) -> Guess:
    """The mean over all blocks."""
    return Guess(x.mean(0), 1 / len(x))


def median(x: np.ndarray, ahead: int) -> Guess:
    """The median over blocks, in sum as large as the mean: rare bursts tell nothing about their next victim."""
    return Guess(_as_large(np.median(x, 0), x), np.pi / 2 / len(x))


def ewma4(x: np.ndarray, ahead: int) -> Guess:
    """Exponentially weighted, half-life a quarter of the window."""
    return _weighted(x, len(x) / 4)


def ewma10(x: np.ndarray, ahead: int) -> Guess:
    """Exponentially weighted, half-life a tenth of the window."""
    return _weighted(x, len(x) / 10)


def krige(x: np.ndarray, ahead: int) -> Guess:
    """Best linear forecast of the log rates, whose deviations forget exponentially; the mean over `ahead` blocks.

    Covariance of two blocks of an expert: steady + drift * exp(-distance / tau) + noise if they are the same.  Noise,
    drift and tau are fitted to the variogram, steady is what the spread between experts leaves.
    Source: simple kriging, e.g. Cressie, Statistics for Spatial Data (1993), section 3.2.
    """
    m = len(x)
    level = x.mean()
    if m < 8 or not level > 0:
        return mean(x, ahead)
    y = np.log(x / level + 1e-3)
    center = float(y.mean())
    spread = float(((y.mean(0) - center) ** 2).mean())
    noise, drift, tau = fit(y, x.mean(0), spread)
    steady = max(spread - drift, 0.0)
    age = np.arange(m, 0.0, -1.0)                                           # blocks before the first one ahead
    far = np.arange(float(ahead))
    cov = steady + drift * np.exp(-np.abs(age[:, None] - age) / tau)
    cov[np.arange(m), np.arange(m)] += noise + 1e-9 * (1 + spread)
    target = steady + drift * np.exp(-age / tau) * np.exp(-far / tau).mean()
    weight = compiled(solve)(cov, target.copy())
    lag = np.exp(-far / tau) * (ahead - far)                                # times the pairs at that distance
    both = steady + drift * (2 * lag.sum() - ahead) / ahead**2
    left = max(both - float((target * weight).sum()), 0.0)                  # variance of the mean ahead, given x
    rate = np.exp(center + (weight[:, None] * (y - center)).sum(0))
    return Guess(_as_large(rate, x), 0.0, float(np.sqrt(np.expm1(min(left, 4.0)))))


FORECASTERS: dict[str, Callable[[np.ndarray, int], Guess]] = {
    "mean": mean, "median": median, "ewma4": ewma4, "ewma10": ewma10, "krige": krige,
}


def blocks(load: LoadWindow) -> tuple[np.ndarray, float]:
    """Rates float64 [at most 64, layers, experts] over equal numbers of blocks, the latest ones; steps in each."""
    size = load.block_sizes()
    whole = [b for b, n in zip(load.blocks, size, strict=True) if n == load.block_steps] or list(load.blocks)
    n = max(-(-len(whole) // SAMPLES), 1)
    steps = float(n * size.max(initial=1))
    whole = whole[len(whole) % n:]
    return np.stack([sum(whole[i + 1:i + n], whole[i]) / steps for i in range(0, len(whole), n)]), steps


def choose(x: np.ndarray, ahead: int, name: str = "backtest") -> tuple[str, tuple[np.ndarray, np.ndarray]]:
    """The forecaster `name`, or for "backtest" the one that would have done best in the window (least L1 error).

    Mean or median: which tells more about one half of the window from the other half, both ways.  Forgetting or not:
    which tells more about the ends of the window from what was before.
    Returns its name, the expected rates [experts] and a relative standard error [experts] of each.
    """
    if name == "backtest":
        name = "median" if len(x) >= 8 and halves(x, "median") < halves(x, "mean") else "mean"
        least = backtest(x, name)
        error = backtest(x, "ewma4") if len(x) >= 8 else np.inf
        if error < least:                               # the load changes for good: how does it?
            least *= BETTER
            for candidate in ("ewma4", "ewma10", "krige"):
                error = error if candidate == "ewma4" else backtest(x, candidate)
                if error < least:
                    name, least = candidate, error
    elif name not in FORECASTERS:
        raise ConfigError(unknown("forecaster", name, ("backtest", *FORECASTERS)))
    rate, noise, error = FORECASTERS[name](x, ahead)
    level = x.mean(0)
    jumps = (np.diff(x, axis=0) ** 2).sum(0) / max(2 * (len(x) - 1), 1)     # variance from block to block
    return name, (rate, np.sqrt(noise * jumps / np.where(level > 0, level, 1) ** 2 + error**2))


def backtest(x: np.ndarray, name: str) -> float:
    """L1 error of shares, summed over forecasts from the first 4, 5 and 6 eighths of the blocks."""
    n = len(x)
    return sum(_error(x[:cut], x[cut:], name) for cut in (n // 2, n * 5 // 8, n * 3 // 4))


def halves(x: np.ndarray, name: str) -> float:
    """L1 error of shares, from the first half about the second and the other way round."""
    a, b = x[:len(x) // 2], x[len(x) // 2:]
    return _error(a, b, name) + _error(b, a, name)


def _error(past: np.ndarray, future: np.ndarray, name: str) -> float:
    if not (past.any() and future.any()):
        return 0.0
    guess, seen = FORECASTERS[name](past, len(future)).rate, future.mean(0)
    return float(np.abs(guess / guess.sum() - seen / seen.sum()).sum())


def _as_large(rate: np.ndarray, x: np.ndarray) -> np.ndarray:
    total = rate.sum()
    return rate * (x.sum() / len(x) / total) if total > 0 else x.mean(0)


def _weighted(x: np.ndarray, half_life: float) -> Guess:
    w = 0.5 ** (np.arange(len(x) - 1.0, -1.0, -1.0) / half_life)
    w /= w.sum()
    return Guess((x * w[:, None]).sum(0), float((w * w).sum()))


def fit(y: np.ndarray, weight: np.ndarray, spread: float) -> tuple[float, float, float]:
    """(noise, drift, tau) of noise + drift * (1 - exp(-lag / tau)), least squares over lags up to half the window.

    The drift cannot exceed the spread between experts.  tau is searched on a grid, in blocks.
    """
    m = len(y)
    lag = np.arange(1, m // 2 + 1)
    gamma = compiled(variogram)(y, weight / weight.sum(), len(lag))
    w = (m - lag) / (m - lag).sum()
    tau = m * 2.0 ** np.arange(-6, 4.5, 0.5)
    f = 1 - np.exp(-lag / tau[:, None])                                     # [taus, lags]
    f0, g0 = (w * f).sum(1), (w * gamma).sum()
    slope = (w * (f - f0[:, None]) * (gamma - g0)).sum(1) / np.maximum((w * (f - f0[:, None]) ** 2).sum(1), 1e-300)
    slope = np.clip(slope, 0, spread)
    through = np.clip((w * f * gamma).sum(1) / (w * f * f).sum(1), 0, spread)
    slope = np.where(g0 - slope * f0 < 0, through, slope)
    noise = np.maximum(g0 - slope * f0, 0)
    error = (w * (gamma - noise[:, None] - slope[:, None] * f) ** 2).sum(1)
    i = int(error.argmin())
    return float(noise[i]), float(slope[i]), float(tau[i])


def variogram(y, weight, lags):
    """float64 [lags]: half the mean squared difference of y [blocks, experts] at lag 1, 2, ...; weight [experts]."""
    m, n = y.shape
    out = np.zeros(lags)
    each = np.empty(n)
    for k in range(1, lags + 1):
        each[:] = 0.0
        for t in range(m - k):
            for e in range(n):
                d = y[t + k, e] - y[t, e]
                each[e] += d * d
        total = 0.0
        for e in range(n):
            total += each[e] * weight[e]
        out[k - 1] = 0.5 * total / (m - k)
    return out


def solve(a, b):
    """x with a x = b for a symmetric positive definite a [n, n]; Cholesky, in place of both operands."""
    n = len(b)
    for j in range(n):
        for k in range(j):
            a[j, j] -= a[j, k] * a[j, k]
        a[j, j] = np.sqrt(max(a[j, j], 1e-300))
        for i in range(j + 1, n):
            s = a[i, j]
            for k in range(j):
                s -= a[i, k] * a[j, k]
            a[i, j] = s / a[j, j]
    for i in range(n):
        for k in range(i):
            b[i] -= a[i, k] * b[k]
        b[i] /= a[i, i]
    for i in range(n - 1, -1, -1):
        for k in range(i + 1, n):
            b[i] -= a[k, i] * b[k]
        b[i] /= a[i, i]
    return b
