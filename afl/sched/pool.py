"""The block pool: which cache blocks are free.

A persistent stack.  Taking moves the top down and writes nothing; giving back writes above the top.  Block 0 is the
null block, the target of padding: it is never in the pool.
"""

import attrs
import numpy as np

from afl.versioned import VArray


@attrs.frozen(eq=False)
class BlockPool:
    """Free blocks out of 1..size."""

    stack: VArray             # int32 [size]; the first `free` entries are free, the last of them is taken first
    free: int
    size: int

    @classmethod
    def of(cls, size: int) -> "BlockPool":
        """A pool with blocks 1..size, all free, handed out in that order.

        >>> ids, pool = BlockPool.of(5).take(2)
        >>> ids.tolist(), pool.free, pool.give(ids[::-1]).take(1)[0].tolist()
        ([1, 2], 3, [1])
        """
        return cls(VArray(np.arange(size, 0, -1, dtype=np.int32)), size, size)

    def take(self, n: int) -> tuple[np.ndarray, "BlockPool"]:
        """`n` free blocks, int32 [n], and the pool without them."""
        assert 0 <= n <= self.free, (n, self.free)
        ids = self.stack.array[self.free - n : self.free][::-1].copy()
        return ids, BlockPool(self.stack, self.free - n, self.size)

    def give(self, ids: np.ndarray) -> "BlockPool":
        """The pool with `ids` free again; the last of them is reused first."""
        top = self.free + len(ids)
        assert top <= self.size, (self.free, len(ids), self.size)
        return BlockPool(self.stack.set(slice(self.free, top), ids), top, self.size)

    def ids(self) -> np.ndarray:
        """The free blocks, bottom of the stack first."""
        return self.stack.array[: self.free].copy()
