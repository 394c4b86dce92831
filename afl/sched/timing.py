"""How long a step takes: t(chunk, history) = a * chunk * (chunk + 2 history) + b * chunk + c, summed over its prompts.

a is attention, b the tokens, c what a step costs anyway; milliseconds.  A chunk of x tokens behind L computed ones
costs f(L + x) - f(L) with f(l) = a l^2 + b l, so equal-time chunks shrink as the history grows.
"""

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from afl.sched.plan import Plan


@attrs.frozen
class Quad:
    """Coefficients, none negative."""

    a: float
    b: float
    c: float = 0.0

    def ms(self, start: float, tokens: float) -> float:
        """Time of `tokens` tokens behind `start` others, without the fixed part.

        >>> round(Quad(1e-6, 0.01).ms(0, 8192), 3)
        149.029
        """
        return self.a * tokens * (tokens + 2 * start) + self.b * tokens


def features(plan: Plan) -> tuple[float, float, float]:
    """What a plan's time is linear in: sum of chunk * (chunk + 2 history), tokens, 1."""
    n, start = plan.grant.astype(np.float64), plan.start.astype(np.float64)
    return float((n * (n + 2 * start)).sum()), float(n.sum()), 1.0


def fit(samples: Iterable[tuple[Sequence[float], float]]) -> Quad:
    """Non-negative least squares of relative errors over (features, ms); noise grows with what is measured.

    >>> true = Quad(2e-6, 0.02, 3.0)
    >>> rows = [((n * (n + 2 * L), n, 1.0), true.ms(L, n) + true.c) for n in (64, 512, 2048) for L in (0, 4096)]
    >>> bool(abs(fit(rows).a - 2e-6) < 1e-12)
    True
    """
    rows = list(samples)
    ms = np.maximum(np.array([t for _, t in rows], np.float64), 1e-9)
    x = np.array([f for f, _ in rows], np.float64) / ms[:, None]
    scale = np.maximum(np.abs(x).max(0), 1e-300)
    return Quad(*(_nnls(x / scale, np.ones(len(ms))) / scale).tolist())


def solve(quad: Quad, start: float, ms: float) -> float:
    """The tokens behind `start` computed ones that take `ms`: the stable root, exact for a -> 0; inf if nothing costs.

    >>> [round(solve(Quad(1e-6, 0.01), L, 149.029), 1) for L in (0, 8192, 32768, 65536, 131072)]
    [8192.0, 4781.8, 1923.9, 1048.6, 546.5]
    """
    slope = 2 * quad.a * start + quad.b
    below = slope + (slope * slope + 4 * quad.a * ms) ** 0.5
    return 2 * ms / below if below > 0 else float("inf")


def clamp(tokens: float, remaining: int, most: int, unit: int, tail: float = 1.25) -> int:
    """A chunk: a multiple of `unit`, at least one; all that is left if that is at most `tail` times the chunk.

    >>> clamp(1923.9, 10_000, 8192, 128), clamp(1000, 1200, 8192, 128), clamp(50, 10_000, 8192, 128)
    (1920, 1200, 128)
    """
    limit = min(remaining, most)
    if remaining <= min(tail * tokens, most):
        return remaining
    return min(max(int(min(tokens, limit)) // unit * unit, unit), limit)


def _nnls(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares with no negative coefficient: the best of the fits over all subsets of columns that has none."""
    k, best, least = x.shape[1], np.zeros(x.shape[1]), float((y * y).sum())
    for mask in range(1, 1 << k):
        use = [i for i in range(k) if mask >> i & 1]
        found, *_ = np.linalg.lstsq(x[:, use], y, rcond=None)
        error = float(((x[:, use] @ found - y) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(k), error
            best[use] = found
    return best
