"""Our policy: small steps from the present placement, against forecast risk, only where they pay for themselves.

Per layer: a forecast of each expert's load, by the method that would have forecast the end of the window best; its
covariances, from what fluctuates faster than a quarter of the window, plus the forecast's own error; a local search
from the present placement, with and without new replica numbers, in which every move has its price in link time.  The
result is taken only if the peak risk falls by more than `gate`, and the peak over scenarios of the next window by more
than two standard errors.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from afl.dist.eplb.exchange import exchange, refill, tally
from afl.dist.eplb.forecast import blocks, choose
from afl.dist.eplb.loops import compiled, covariance, peaks, replicate
from afl.dist.eplb.problem import held_of, relabel, require, settle
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology

FINE = 1e-3             # the search goes on until the peak risk is this near to the average
MOST_WITH_RISK = 2048   # experts; above, the mean alone counts (covariances would take experts ** 2 numbers)
HASTE = 0.5             # without risk, ranks in the lower half between average and peak are let alone: it saves time
NEVER = 1e9             # a price that nothing is worth
STEPS = 8               # searches of a layer, each from the result of the one before
ERRORS = 2.0            # standard errors by which a new placement must win


def rebalance(load: LoadWindow, now: Placement, topology: Topology, params: Params) -> Placement:
    """The placement after the moves that are worth it; most layers of a steady load stay as they are."""
    require(load, now, topology, params)
    if not load.total.any():
        return now
    rows, width = blocks(load)
    ahead = max(round(params.horizon_steps / width), 1)
    price = price_of_move(now, topology, params)
    out = now.by_rank.copy()
    fixed = np.zeros(out.shape, np.bool_)
    for place in params.pinned:
        fixed[place] = True
    for layer in range(now.layers):
        x = np.ascontiguousarray(rows[:, layer])
        if x.any():
            out[layer] = plan_layer(grid(x / x.mean()), out[layer], fixed[layer], ahead, price, params)
    return Placement(out.reshape(now.layers, -1), now.ranks)


def price_of_move(now: Placement, topology: Topology, params: Params) -> float:
    """What a move costs in units of a layer's peak over average: link time of the move against expert time saved."""
    links = topology.bytes_per_s
    slowest = links.cross_node if len(np.unique(topology.node)) > 1 else links.same_node
    cost = params.bytes_per_expert / slowest / now.ranks                    # the ranks receive at the same time
    worth = params.horizon_steps * params.step_seconds * params.expert_share / now.layers
    return min(cost / worth, NEVER) if worth > 0 else NEVER


def plan_layer(x: np.ndarray, now: np.ndarray, fixed: np.ndarray, ahead: int, price: float,
               params: Params) -> np.ndarray:
    """int32 [ranks, slots per rank]: the new slots of a layer, or `now`; x [blocks, experts], 1 = the average.

    Steps are taken until none is worth it, so that planning again with the same loads changes nothing.
    """
    _, (mean, error) = choose(x, ahead, params.forecaster)
    mean, error = grid(mean), grid(error)
    fast = detrended(x)
    z = params.z if len(mean) <= MOST_WITH_RISK else 0.0
    cov = np.zeros((len(mean), len(mean)) if z > 0 else (0, 0))
    if z > 0:
        compiled(covariance)(fast, cov)
        cov[np.arange(len(mean)), np.arange(len(mean))] += (mean * error) ** 2
    coming = Coming(mean, cov, z, scenarios(fast, mean, error))
    left = int(params.max_move_frac * (now >= 0).sum())
    for _ in range(STEPS):
        new = step(coming, now, fixed, price, left, params)
        if new is now:
            break
        left -= int((new != now).sum())
        now = new
    return now


def step(coming: "Coming", now: np.ndarray, fixed: np.ndarray, price: float, budget: int, params: Params) -> np.ndarray:
    """The slots after the better of two searches, with and without new replica numbers; `now` if it is not worth it."""
    mean, cov, z = coming.mean, coming.cov, coming.z
    home = held_of(now, len(mean))
    count = home.sum(0)
    start = Search(now, home, count, mean, cov, z)
    if start.peak() <= 1 + params.tol:
        return now
    weight = mean + z * np.sqrt(np.diag(cov)) if z > 0 else mean
    target = compiled(replicate)(weight, int(count.sum()) - len(mean), len(now))[-1]
    best, value = start, start.peak()
    for counts in (count, target) if (count != target).any() else (count,):
        s = Search(now, home, count, mean, cov, z)
        v = s.run(fixed, counts, price, budget)
        if v < value and s.peak() < start.peak() - params.gate:
            best, value = s, v
    if best is start:
        return now
    gain = compiled(peaks)(coming.rows, count, home) - compiled(peaks)(coming.rows, best.count, best.held)
    if gain.mean() <= ERRORS * gain.std() / np.sqrt(max(len(gain) - 1, 1)):
        return now
    return keep_names(best, now, fixed)


def keep_names(best: "Search", now: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """int32 [ranks, slots per rank]: the found placement, with its ranks renamed where that saves moves."""
    held = best.held
    if not fixed.any():
        renamed = relabel(held, now)
        if (renamed & best.home).sum() > (held & best.home).sum():
            held = renamed
    return settle(held, now, np.argsort(-best.mean, kind="stable"))


def grid(x: np.ndarray) -> np.ndarray:
    """x of about 1, to nine digits: rounding errors must not depend on the unit of loads or the order of experts."""
    return np.rint(x * 2.0**30) / 2.0**30


def detrended(x: np.ndarray) -> np.ndarray:
    """x [blocks, experts] minus its moving average over a quarter of the blocks."""
    m = len(x)
    total = np.concatenate([np.zeros((1, x.shape[1])), np.cumsum(x, 0)])
    t, half = np.arange(m), max(m // 8, 1)
    a, b = np.maximum(t - half, 0), np.minimum(t + half + 1, m)
    return x - (total[b] - total[a]) / (b - a)[:, None]


def scenarios(fast: np.ndarray, mean: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Loads [blocks, experts] that may come: the forecast, its error drawn anew for each, the fluctuations seen.

    The draws are the same in every call, given to the experts in order of load.
    """
    draw = np.empty_like(fast)
    draw[:, np.argsort(-mean, kind="stable")] = normal(fast.shape)
    return np.maximum(mean + mean * error * draw + fast, 0.0)


@lru_cache(maxsize=4)
def normal(shape: tuple[int, int]) -> np.ndarray:
    """Standard normal draws, the same for a shape."""
    return np.random.default_rng(0).standard_normal(shape)


class Coming(NamedTuple):
    """What is expected of a layer's loads."""

    mean: np.ndarray            # float64 [experts]
    cov: np.ndarray             # float64 [experts, experts]; [0, 0] without risk
    z: float
    rows: np.ndarray            # float64 [scenarios, experts]


class Search:
    """The arrays of one search from a layer's present slots; see exchange.py."""

    def __init__(self, now: np.ndarray, home: np.ndarray, count: np.ndarray, mean: np.ndarray, cov: np.ndarray,
                 z: float) -> None:
        ranks, experts = home.shape
        self.slot, self.home, self.held, self.count = now.astype(np.int64), home, home.copy(), count.copy()
        self.mean, self.cov, self.z = mean, cov, float(z)
        self.sums = np.zeros_like(cov), np.zeros((ranks, experts)), np.zeros(ranks), np.zeros(ranks)
        compiled(tally)(self.slot, self.count, mean, cov, self.z, *self.sums)

    def peak(self) -> float:
        """Largest risk over the average load of the ranks."""
        _, _, mu, var = self.sums
        average = mu.sum() / len(mu)
        return float((mu + self.z * np.sqrt(np.maximum(var, 0))).max() / average) if average > 0 else 1.0

    def run(self, fixed: np.ndarray, target: np.ndarray, price: float, budget: int) -> float:
        """Go to the replica numbers `target`, then exchange; peak risk over average plus the price of all moves."""
        moves = 0
        if (target != self.count).any():
            moves = compiled(refill)(self.slot, fixed, self.home, self.held, self.count, target, self.mean, self.cov,
                                     self.z, budget, *self.sums)
        return compiled(exchange)(self.slot, fixed, self.home, self.held, self.count, self.mean, self.cov, self.z, FINE,
                                  0.0 if self.z > 0 else HASTE, price, moves, budget, 4 * self.slot.size, *self.sums)[0]
