"""Invented expert loads: five ways in which a router's load changes over time, all drawn from one seeded generator.

Per step and layer one multinomial draw of tokens * topk assignments; no expert gets more than one of a token's choices,
so probabilities are capped at 1 / topk.
"""

from collections.abc import Callable

import numpy as np

from afl.errors import BalanceError, unknown

TOPICS = 16                     # expert groups that burst together
BURST, STAY, START = 6.0, 1 / 20, 1 / 120       # factor; probability per step to stop, to start


def names() -> list[str]:
    """The traces there are."""
    return sorted(_TRACES)


def trace(name: str, *, steps: int, layers: int, experts: int, tokens: int, topk: int = 8, seed: int = 0) -> np.ndarray:
    """int32 [steps, layers, experts]: tokens of each expert in each step.

    zipf: rank ** -0.8, stationary.  lognormal: exp(N(0, 1)) times Gamma(4, 1/4) in every step.  drift: exp of an
    Ornstein-Uhlenbeck process of unit variance, correlation time 1200 steps.  bursty: exp(N(0, 0.6)), 16 topics that
    partition the experts of a layer, each bursting x 6 now and then, in all layers at once.  flat: exp(N(0, 0.2)).
    """
    if name not in _TRACES:
        raise BalanceError(unknown("trace", name, _TRACES))
    if topk > experts:
        raise BalanceError(f"topk must be at most the number of experts, got {topk} of {experts}")
    rng = np.random.default_rng(seed)
    weights = _TRACES[name](rng, steps, layers, experts)
    out = np.empty((steps, layers, experts), np.int32)
    for t in range(steps):
        out[t] = rng.multinomial(tokens * topk, cap(weights(t), 1 / topk))
    return out


def cap(weights: np.ndarray, most: float) -> np.ndarray:
    """Probabilities [..., experts] proportional to the weights, what exceeds `most` given to the others."""
    p = weights / weights.sum(-1, keepdims=True)
    full = np.zeros(p.shape, bool)
    while (p > most * (1 + 1e-12)).any():
        full |= p > most
        free = np.where(full, 0.0, p)
        left = 1 - most * full.sum(-1, keepdims=True)
        p = np.where(full, most, free * left / np.maximum(free.sum(-1, keepdims=True), 1e-300))
    return p


def _zipf(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Callable[[int], np.ndarray]:
    rank = np.stack([rng.permutation(experts) for _ in range(layers)])
    w = (1.0 + rank) ** -0.8
    return lambda t: w


def _lognormal(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Callable[[int], np.ndarray]:
    w = np.exp(rng.standard_normal((layers, experts)))
    return lambda t: w * rng.gamma(4.0, 0.25, w.shape)


def _drift(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Callable[[int], np.ndarray]:
    x = rng.standard_normal((layers, experts))
    keep = np.exp(-1 / 1200)

    def weights(t: int) -> np.ndarray:
        nonlocal x
        x = keep * x + np.sqrt(1 - keep**2) * rng.standard_normal(x.shape)
        return np.exp(x)

    return weights


def _bursty(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Callable[[int], np.ndarray]:
    base = np.exp(0.6 * rng.standard_normal((layers, experts)))
    topic = np.stack([rng.permutation(experts) % TOPICS for _ in range(layers)])
    on = rng.random(TOPICS) < START / (START + STAY)

    def weights(t: int) -> np.ndarray:
        nonlocal on
        on = np.where(on, rng.random(TOPICS) >= STAY, rng.random(TOPICS) < START)
        return base * np.where(on, BURST, 1.0)[topic]

    return weights


def _flat(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Callable[[int], np.ndarray]:
    w = np.exp(0.2 * rng.standard_normal((layers, experts)))
    return lambda t: w


_TRACES = {"zipf": _zipf, "lognormal": _lognormal, "drift": _drift, "bursty": _bursty, "flat": _flat}
