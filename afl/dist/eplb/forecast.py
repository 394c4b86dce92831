"""What the experts' loads will be: several forecasters of one layer, and the choice between them by back-test.

A forecaster takes block rates [blocks, experts] and the blocks to look ahead, and gives the expected rates [experts]
with a relative standard error of each.  `krige` fits how fast the logarithms of the rates forget (their variogram) and
draws them back to their common mean accordingly; the others are weighted means and the median.
"""

from collections.abc import Callable

import numpy as np

from afl.dist.eplb.loops import compiled
from afl.errors import ConfigError, unknown

Forecast = tuple[np.ndarray, np.ndarray]            # rates [experts], relative standard error [experts]


def mean(x: np.ndarray, ahead: int) -> Forecast:
    """The mean over all blocks."""
    return x.mean(0), _standard_error(x, np.full(len(x), 1 / len(x)))


def median(x: np.ndarray, ahead: int) -> Forecast:
    """The median over blocks, in sum as large as the mean: rare bursts tell nothing about their next victim."""
    return _as_large(np.median(x, 0), x), 1.25 * _standard_error(x, np.full(len(x), 1 / len(x)))


def ewma4(x: np.ndarray, ahead: int) -> Forecast:
    """Exponentially weighted, half-life a quarter of the window."""
    return _weighted(x, len(x) / 4)


def ewma10(x: np.ndarray, ahead: int) -> Forecast:
    """Exponentially weighted, half-life a tenth of the window."""
    return _weighted(x, len(x) / 10)


def krige(x: np.ndarray, ahead: int) -> Forecast:
    """Best linear forecast of the log rates, whose deviations forget exponentially; the mean over `ahead` blocks.

    Covariance of two blocks of an expert: steady + drift * exp(-distance / tau) + noise if they are the same.  Noise,
    drift and tau are fitted to the variogram, steady is what the spread between experts leaves.
    Source: simple kriging, e.g. Cressie, Statistics for Spatial Data (1993), section 3.2.
    """
    m, n = x.shape
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
    return _as_large(rate, x), np.full(n, np.sqrt(np.expm1(min(left, 4.0))))


FORECASTERS: dict[str, Callable[[np.ndarray, int], Forecast]] = {
    "mean": mean, "median": median, "ewma4": ewma4, "ewma10": ewma10, "krige": krige,
}
BETTER = 0.97       # a forecaster replaces the mean only if its error is below this part of the mean's


def choose(x: np.ndarray, ahead: int, name: str = "backtest") -> tuple[str, Forecast]:
    """The forecaster `name`, or the one with the least L1 error over the ends of the window: its name and forecast."""
    if name != "backtest":
        if name not in FORECASTERS:
            raise ConfigError(unknown("forecaster", name, ("backtest", *FORECASTERS)))
        return name, FORECASTERS[name](x, ahead)
    best, least = "mean", np.inf
    for candidate in FORECASTERS:
        error = backtest(x, candidate)
        if error < least * (BETTER if best == "mean" else 1.0):
            best, least = candidate, error
        if candidate == "mean" and len(x) < 8:
            break
    return best, FORECASTERS[best](x, ahead)


def backtest(x: np.ndarray, name: str) -> float:
    """L1 error of shares, summed over forecasts from the first 4, 5 and 6 eighths of the blocks."""
    error = 0.0
    for cut in (len(x) // 2, len(x) * 5 // 8, len(x) * 3 // 4):
        past, future = x[:cut], x[cut:].mean(0)
        if cut and past.sum() > 0 and future.sum() > 0:
            guess = FORECASTERS[name](past, len(x) - cut)[0]
            error += float(np.abs(guess / guess.sum() - future / future.sum()).sum())
    return error


def _as_large(rate: np.ndarray, x: np.ndarray) -> np.ndarray:
    total = rate.sum()
    return rate * (x.sum() / len(x) / total) if total > 0 else x.mean(0)


def _weighted(x: np.ndarray, half_life: float) -> Forecast:
    w = 0.5 ** (np.arange(len(x) - 1.0, -1.0, -1.0) / half_life)
    w /= w.sum()
    return (x * w[:, None]).sum(0), _standard_error(x, w)


def _standard_error(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Relative standard error [experts] of the weighted mean of independent blocks; changes from block to block only."""
    if len(x) < 2:
        return np.zeros(x.shape[1])
    level = x.mean(0)
    variance = (np.diff(x, axis=0) ** 2).mean(0) / 2
    return np.sqrt(variance * (weight**2).sum()) / np.where(level > 0, level, 1)


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
