"""Sizes of a step: the ladder of buckets of a captured chip, and the ranges that one widened program covers."""

import itertools
from collections.abc import Mapping

import attrs

from afl.errors import ConfigError

Sizes = Mapping[str, int]
Range = Mapping[str, tuple[int, int]]      # one interval per size, both ends included


@attrs.frozen
class Ladder:
    """Declared sizes per name, ascending; a step is padded up to the next ones.

    >>> Ladder({"tokens": (1, 2, 4), "rows": (1, 4)}).fit({"tokens": 3, "rows": 1})
    {'tokens': 4, 'rows': 1}
    """

    steps: Mapping[str, tuple[int, ...]]

    def __attrs_post_init__(self) -> None:
        for name, s in self.steps.items():
            if not s or list(s) != sorted(set(s)) or s[0] < 1:
                raise ConfigError(f"ladder of {name!r} is {list(s)}; it must be ascending sizes from 1 on")

    def fit(self, sizes: Sizes) -> dict[str, int] | None:
        """The smallest bucket that holds these sizes; None if they exceed the largest."""
        out = {}
        for name, s in self.steps.items():
            step = next((n for n in s if n >= sizes[name]), None)
            if step is None:
                return None
            out[name] = step
        return out

    def buckets(self) -> list[dict[str, int]]:
        """Every bucket, largest first."""
        names = list(self.steps)
        return [dict(zip(names, c, strict=True)) for c in itertools.product(*(reversed(self.steps[n]) for n in names))]


def inside(sizes: Sizes, r: Range) -> bool:
    """True if every size lies in its interval."""
    for name, (lo, hi) in r.items():
        if not lo <= sizes[name] <= hi:
            return False
    return True


def probes(r: Range) -> tuple[dict[str, int], ...]:
    """Points at which a range is traced: all low, all high, and one between with pairwise distinct primes.

    Equal programs at the ends show that the text does not mention a size; the primes catch what the ends have in
    common by accident (two equal sizes, a shared divisor).

    >>> probes({"tokens": (2, 8192), "rows": (1, 256)})
    ({'tokens': 2, 'rows': 1}, {'tokens': 8192, 'rows': 256}, {'tokens': 127, 'rows': 13})
    """
    low, high = {n: lo for n, (lo, _) in r.items()}, {n: hi for n, (_, hi) in r.items()}
    middle: dict[str, int] = {}
    for n, (lo, hi) in r.items():
        start = max(lo, round((lo * hi) ** 0.5))
        order = itertools.chain(range(start, lo - 1, -1), range(start + 1, hi + 1))
        free = [k for k in itertools.islice(order, 1000) if k not in middle.values()]
        middle[n] = next((k for k in free if _is_prime(k)), free[0] if free else lo)
    points = (low, high, middle)
    return tuple(p for i, p in enumerate(points) if p not in points[:i])


def show_sizes(sizes: Sizes) -> str:
    """"tokens=4 rows=2"."""
    return " ".join(f"{n}={v}" for n, v in sizes.items())


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))
