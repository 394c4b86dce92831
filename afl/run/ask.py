"""What is asked for before a weight is read, and what it means that it does not hold.  Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from afl.chip import Chip
from afl.config import EngineConfig


@attrs.frozen
class Budget:
    """Bytes of one device (or of the host) and what the pool must leave of them.

    total: of the device.  fraction: of it that afl may take.  others: in use by other processes, counted once.
    own: parameters, temporaries and buffers of this rank.  block: bytes of one cache block of this rank.

    >>> Budget(64, 0.3, others=20, own=0).left, Budget(64, 0.9, others=20, own=10).left, Budget(64, 0.3, own=30).left
    (19, 34, 0)
    """

    total: int
    fraction: float = 1.0
    others: int = 0
    own: int = 0
    block: int = 1
    where: str = "the device"
    ranks: int = 0          # tp at which the parameters would fit, 0: unknown or none

    @property
    def usable(self) -> int:
        """The smaller of the allowed part and of what others leave."""
        return max(0, min(int(self.total * self.fraction), self.total - self.others))

    @property
    def left(self) -> int:
        """Bytes for the cache: what is usable less the own use, never below 0."""
        return max(0, self.usable - self.own)

    @property
    def blocks(self) -> int:
        """Usable blocks that fit; the null block comes on top."""
        return max(0, self.left // self.block - 1)


@attrs.frozen(eq=False)
class Ask:
    """What is asked for.  None: not known (yet); rules that need it are left out.

    config: an EngineConfig, or a `Wish` whose values may not hold.  settings: config.json.  c: the model's Config.
    caches: CacheSpec per layer.  max_len: positions of the model.  dtype: name of the compute dtype.
    unserved: what `afl/run/unserved.py` says.
    """

    config: Any
    chip: Chip | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    settings: Mapping[str, Any] | None = None
    c: Any = None
    caches: tuple[Any, ...] | None = None
    max_len: int | None = None
    dtype: str | None = None
    unserved: tuple[str, ...] | None = None
    budget: Budget | None = None


class Wish:
    """Options as they were given, defaults filled in and nothing checked."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.__dict__.update({f.name: options.get(f.name, f.default) for f in attrs.fields(EngineConfig)})


@attrs.frozen
class Violation:
    """A rule that does not hold: what, and the nearest values that do.  `not_yet`: it will be possible one day."""

    text: str
    got: Any
    expected: str
    nearest: tuple[Any, ...] = ()
    rule: str = ""
    not_yet: bool = False

    def __str__(self) -> str:
        return self.text


@attrs.frozen
class Rule:
    """One row of the table.  options: what it is about.  needs: fields of `Ask` that must be known."""

    name: str
    why: str
    options: tuple[str, ...]
    needs: tuple[str, ...]
    check: Callable[[Ask], Violation | None]
    not_yet: bool = False


TABLE: list[Rule] = []


def rule(name: str, why: str, options: str, needs: str = "", not_yet: bool = False) -> Callable[[Any], Any]:
    """Append the decorated function to the table."""

    def wrap(check: Callable[[Ask], Violation | None]) -> Callable[[Ask], Violation | None]:
        TABLE.append(Rule(name, why, tuple(options.split()), tuple(needs.split()), check, not_yet))
        return check

    return wrap
