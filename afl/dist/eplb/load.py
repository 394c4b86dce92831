"""Expert loads as a value: a pure fold over per-step token counts, in logical experts.

Blocks of steps begin at multiples of `block_steps` of the agreed step number, not at the beginning of a window.  Two
windows that follow each other therefore merge into exactly the window of the concatenation.
"""

from typing import Any

import attrs
import numpy as np
from attrs import evolve

from afl.errors import BalanceError, violations

BLOCKS = 64                 # block sums that are kept
MOST = 1 << 48              # tokens of one expert in one step; sums of blocks stay exact in float64


def read_counts(counts: Any, layers: int | None = None, experts: int | None = None) -> np.ndarray:
    """`counts` as int64 [steps, layers, experts]; [layers, experts] is one step.

    Raises `BalanceError` for wrong shapes and for counts that are negative, not finite, not whole or absurdly large.
    """
    x = np.asarray(counts)
    if x.dtype.kind not in "iuf" or x.ndim not in (2, 3):
        raise BalanceError(f"expert loads must be numbers [steps, layers, experts] or [layers, experts], "
                           f"got {x.dtype} {list(x.shape)}")
    x = x[None] if x.ndim == 2 else x
    bad = []
    for name, got, expected in (("layers", x.shape[1], layers), ("experts", x.shape[2], experts)):
        if got == 0 or expected not in (None, got):
            bad.append(f"{name}: got {got}, expected {'at least 1' if expected is None else expected}")
    if x.dtype.kind == "f":
        whole = np.isfinite(x)
        bad += _say("is not finite", ~whole, x)
        bad += _say("is not a whole number of tokens; scale and round the loads first", whole & (x != np.rint(x)), x)
    bad += _say("is negative", x < 0, x)
    bad += _say(f"is above {MOST} tokens in one step", np.isfinite(x) & (x > MOST), x)
    if bad:
        raise BalanceError(violations("expert loads", bad))
    return x.astype(np.int64)


def _say(what: str, where: np.ndarray, x: np.ndarray) -> list[str]:
    if not where.any():
        return []
    t, layer, e = (int(i[0]) for i in np.nonzero(where))
    more = int(where.sum()) - 1
    return [f"step {t}, layer {layer}, expert {e}: {x[t, layer, e]} {what}" + (f" (and {more} more)" if more else "")]


@attrs.frozen(eq=False)
class LoadWindow:
    """Token counts of `steps` consecutive steps from step `start` on: totals, the last block sums, a moving average.

    >>> w = LoadWindow.of(np.arange(12).reshape(3, 2, 2))
    >>> w.total.tolist(), w.steps
    ([[12, 15], [18, 21]], 3)
    """

    total: np.ndarray                   # int64 [layers, experts]
    blocks: tuple[np.ndarray, ...]      # float64 [layers, experts] each, sums over a block's steps, oldest first
    ewma_sum: np.ndarray                # float64 [layers, experts], sum of counts * decay ** age
    steps: int = 0
    start: int = 0                      # agreed number of the first step
    block_steps: int = 1
    capacity: int = BLOCKS              # blocks kept
    half_life: float = 150.0            # steps after which a count weighs half in the moving average

    @classmethod
    def empty(cls, layers: int, experts: int, *, start: int = 0, block_steps: int = 1, capacity: int = BLOCKS,
              half_life: float = 150.0) -> "LoadWindow":
        """A window of no steps."""
        sizes = ("layers", layers), ("experts", experts), ("block_steps", block_steps), ("capacity", capacity)
        bad = [f"{n} must be at least 1, got {v}" for n, v in sizes if v < 1]
        if not half_life > 0:
            bad.append(f"half_life must be above 0, got {half_life}")
        if bad:
            raise BalanceError(violations("load window", bad))
        return cls(np.zeros((layers, experts), np.int64), (), np.zeros((layers, experts)), 0, start, block_steps,
                   capacity, half_life)

    @classmethod
    def of(cls, counts: Any, **kw: Any) -> "LoadWindow":
        """The window of recorded counts [steps, layers, experts], all kept in blocks as short as that allows."""
        x = read_counts(counts)
        kw.setdefault("block_steps", max(-(-len(x) // kw.get("capacity", BLOCKS)), 1))
        return cls.empty(x.shape[1], x.shape[2], **kw).fold(x)

    @property
    def layers(self) -> int:
        return self.total.shape[0]

    @property
    def experts(self) -> int:
        return self.total.shape[1]

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.start + self.steps

    @property
    def decay(self) -> float:
        return 0.5 ** (1 / self.half_life)

    @property
    def ewma(self) -> np.ndarray:
        """float64 [layers, experts]: exponentially weighted tokens per step; 0 without steps."""
        weight = (1 - self.decay**self.steps) / (1 - self.decay)
        return self.ewma_sum / weight if self.steps else self.ewma_sum

    def block_sizes(self) -> np.ndarray:
        """float64 [blocks]: steps in each kept block; the first and the last may be cut short."""
        last = -(-self.end // self.block_steps)
        first = np.arange(last - len(self.blocks), last) * self.block_steps
        return np.minimum(first + self.block_steps, self.end) - np.maximum(first, self.start).astype(np.float64)

    def samples(self) -> np.ndarray:
        """float64 [blocks, layers, experts]: tokens per step of the kept whole blocks, oldest first.

        Blocks cut short by the ends of the window are left out if any whole one is kept: fewer steps, more noise.
        """
        size = self.block_sizes()
        keep = size == self.block_steps if (size == self.block_steps).any() else size > 0
        rows = [b / n for b, n, k in zip(self.blocks, size, keep, strict=True) if k]
        return np.stack(rows) if rows else np.zeros((0, *self.total.shape))

    def fold(self, counts: Any) -> "LoadWindow":
        """The window after further steps: `counts` int [layers, experts], or [steps, layers, experts].

        Raises `BalanceError` as `read_counts` does; the old window stays as it is.
        """
        x = read_counts(counts, self.layers, self.experts)
        if not len(x):
            return self
        number = np.arange(self.end, self.end + len(x)) // self.block_steps
        cuts = np.flatnonzero(np.diff(number, prepend=number[0] - 1))
        sums = list(np.add.reduceat(x, cuts, axis=0).astype(np.float64))
        ewma = self.ewma_sum
        for row in x:
            ewma = ewma * self.decay + row
        return self._join(x.sum(0), sums, len(x), ewma)

    def merge(self, later: "LoadWindow") -> "LoadWindow":
        """The window of this one's steps followed by `later`'s, which must begin at this one's `end`.

        Equal to folding the concatenation: exact in totals, blocks and steps; `ewma_sum` up to rounding.
        """
        bad = [f"{n}: got {b}, expected {a}" for n, a, b in (
            ("layers and experts", self.total.shape, later.total.shape), ("first step", self.end, later.start),
            ("block_steps", self.block_steps, later.block_steps), ("capacity", self.capacity, later.capacity),
            ("half_life", self.half_life, later.half_life)) if a != b]
        if bad:
            raise BalanceError(violations("load windows that do not follow each other", bad))
        if not later.steps:
            return self
        ewma = self.ewma_sum * self.decay**later.steps + later.ewma_sum
        return self._join(later.total, list(later.blocks), later.steps, ewma)

    def _join(self, total: np.ndarray, sums: list[np.ndarray], steps: int, ewma: np.ndarray) -> "LoadWindow":
        blocks = list(self.blocks)
        # the joint block is still open; if `later` overflowed its capacity, its first block is another one
        open_block = blocks and self.end % self.block_steps
        if open_block and -(-(self.end + steps) // self.block_steps) - len(sums) == self.end // self.block_steps:
            blocks[-1], sums = blocks[-1] + sums[0], sums[1:]
        blocks = tuple((blocks + sums)[-self.capacity:])
        for a in (*blocks, ewma):
            a.flags.writeable = False
        return evolve(self, total=self.total + total, blocks=blocks, steps=self.steps + steps, ewma_sum=ewma)
