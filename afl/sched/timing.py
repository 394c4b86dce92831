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
    """What the time of a plan's prompts is linear in: sum of chunk * (chunk + 2 history), tokens, 1.

    Rows of one token count for nothing here: they are part of what a step costs anyway.
    """
    prompt = plan.grant > 1
    n, start = plan.grant[prompt].astype(np.float64), plan.start[prompt].astype(np.float64)
    return float((n * (n + 2 * start)).sum()), float(n.sum()), 1.0


@attrs.frozen
class Moments:
    """Sums over measurements that least squares needs, of x = features / ms: errors are relative, as noise is.

    weight: measurements, older ones counting less; xx: x x^T row by row; x: x (the measured value is 1).
    """

    weight: float = 0.0
    xx: tuple[float, ...] = (0.0,) * 9
    x: tuple[float, ...] = (0.0,) * 3

    def add(self, features: Sequence[float], ms: float, memory: float = float("inf")) -> "Moments":
        """With one measurement more; the others fade so that the weight stays at `memory`."""
        x = tuple(f / max(ms, 1e-9) for f in features)
        return self.faded(memory - 1) + Moments(1.0, tuple(u * v for u in x for v in x), x)

    def faded(self, weight: float) -> "Moments":
        """The same with at most this weight."""
        if self.weight <= weight:
            return self
        keep = weight / self.weight
        return Moments(weight, tuple(a * keep for a in self.xx), tuple(a * keep for a in self.x))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.weight + other.weight, tuple(a + b for a, b in zip(self.xx, other.xx, strict=True)),
                       tuple(a + b for a, b in zip(self.x, other.x, strict=True)))

    def quad(self) -> Quad:
        """Non-negative least squares: the best of the fits over all subsets of coefficients that has none below 0."""
        xx, y = np.array(self.xx).reshape(3, 3), np.array(self.x)
        scale = np.sqrt(np.maximum(np.diag(xx), 1e-300))
        xx, y = xx / np.outer(scale, scale), y / scale
        best, least = np.zeros(3), 0.0
        for mask in range(1, 8):
            use = [i for i in range(3) if mask >> i & 1]
            found = np.linalg.lstsq(xx[np.ix_(use, use)], y[use], rcond=None)[0]
            error = float(found @ xx[np.ix_(use, use)] @ found - 2 * y[use] @ found)
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[use] = found
        return Quad(*(best / scale).tolist())


def fit(samples: Iterable[tuple[Sequence[float], float]]) -> Quad:
    """Non-negative least squares of relative errors over (features, ms).

    >>> true = Quad(2e-6, 0.02, 3.0)
    >>> rows = [((n * (n + 2 * L), n, 1.0), true.ms(L, n) + true.c) for n in (64, 512, 2048) for L in (0, 4096)]
    >>> bool(abs(fit(rows).a - 2e-6) < 1e-12)
    True
    """
    total = Moments()
    for features, ms in samples:
        total = total.add(features, ms)
    return total.quad()


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
