"""The block pool: who holds which cache block, which are free in what order, and what the free ones still contain.

Free blocks form a circular list through block 0, the null block, which is itself never free and never held: it is the
target of padding and of positions that a window has left.  A block without a name goes to the front of the list when
its last holder leaves and is reused first; a block with a name (its content is a known prefix) goes to the back, so
that the least recently used content is lost first.  A name belongs to one block: a second block with the same content
stays nameless.
"""

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from afl.sched.loops import compiled
from afl.versioned import VArray, VDict

NEXT, PREV, REFS, BORN = range(4)                  # parts of `links`


@attrs.frozen(eq=False)
class BlockPool:
    """Blocks 1..size.  links: int32 [4 * (size + 1)]: next and previous free block, holders,
    step of naming + 1 (0: none).
    """

    links: VArray
    names: VArray             # object [size + 1]: key of the content, None if nameless
    blocks: VDict             # key -> block
    free: int
    size: int
    evictions: int = 0        # named blocks that were reused

    @classmethod
    def of(cls, size: int) -> "BlockPool":
        """A pool with all blocks free, handed out in order.

        >>> ids, pool = BlockPool.of(5).take(2)
        >>> ids.tolist(), pool.free, pool.drop(ids[::-1]).take(1)[0].tolist()
        ([1, 2], 3, [1])
        """
        links = np.zeros((4, size + 1), np.int32)
        ring = np.arange(size + 1, dtype=np.int32)
        links[NEXT], links[PREV] = np.roll(ring, -1), np.roll(ring, 1)
        return cls(VArray(links.ravel()), VArray(np.full(size + 1, None, object)), VDict(), size, size)

    def take(self, n: int) -> tuple[np.ndarray, "BlockPool"]:
        """`n` free blocks with one holder each, int32 [n]; what they contained is forgotten."""
        assert 0 <= n <= self.free, (n, self.free)
        ids = np.empty(n, np.int32)
        links, lost = self.links.edit(compiled(_take), 2 * n + 2, ids, self.size + 1)
        if not lost:
            return ids, BlockPool(links, self.names, self.blocks, self.free - n, self.size, self.evictions)
        names, blocks = self.names.array, self.blocks
        gone = [b for b in ids.tolist() if names[b] is not None]
        for b in gone:
            blocks = blocks.delete(names[b])
        names = self.names.set(gone, None)
        return ids, BlockPool(links, names, blocks, self.free - n, self.size, self.evictions + lost)

    def hold(self, ids: Sequence[int] | np.ndarray) -> "BlockPool":
        """One more holder for each of `ids`."""
        ids = np.asarray(ids, np.int32)
        links, revived = self.links.edit(compiled(_hold), 3 * len(ids), ids, self.size + 1)
        return BlockPool(links, self.names, self.blocks, self.free - revived, self.size, self.evictions)

    def drop(self, ids: Sequence[int] | np.ndarray) -> "BlockPool":
        """One holder less for each of `ids`, in this order; without a holder a block is free."""
        ids = np.asarray(ids, np.int32)
        links, freed = self.links.edit(compiled(_drop), 5 * len(ids), ids, self.size + 1)
        return BlockPool(links, self.names, self.blocks, self.free + freed, self.size, self.evictions)

    def name(self, pairs: Iterable[tuple[int, bytes]], step: int) -> "BlockPool":
        """Give held blocks their names as of plan `step`; names that are in use, and blocks that have one, stay."""
        known, named, new = self.blocks.get, self.names.array, {}
        taken: set[int] = set()
        for block, key in pairs:
            if known(key) is None and key not in new and block not in taken and named[block] is None:
                new[key] = block
                taken.add(block)
        if not new:
            return self
        at = np.fromiter(new.values(), np.intp, len(new))
        values = np.empty(len(new), object)
        values[:] = list(new)
        return attrs.evolve(self, links=self.links.set(at + BORN * (self.size + 1), step + 1),
                            names=self.names.set(at, values), blocks=self.blocks.update(new))

    def forget(self, ids: Iterable[int] | None = None) -> "BlockPool":
        """Take the names of `ids` away, of all blocks by default: their content is not to be found any more."""
        names, blocks = self.names.array, self.blocks
        gone = [b for b in (range(self.size + 1) if ids is None else ids) if names[b] is not None]
        if not gone:
            return self
        for b in gone:
            blocks = blocks.delete(names[b])
        at = np.array(gone, np.intp)
        return attrs.evolve(self, links=self.links.set(at + BORN * (self.size + 1), 0),
                            names=self.names.set(at, None), blocks=blocks)

    def part(self, which: int) -> np.ndarray:
        """One of NEXT, PREV, REFS, BORN for each block; a view, so read it at once."""
        m = self.size + 1
        return self.links.array[which * m : (which + 1) * m]

    def ids(self) -> list[int]:
        """The free blocks in the order in which they will be taken."""
        out, after = [], self.part(NEXT)
        b = int(after[0])
        while b:
            out.append(b)
            b = int(after[b])
        return out


def _take(links, at, old, ids, m):
    """Unlink the first blocks; returns how many had a name."""
    n, lost, b = 0, 0, links[0]
    for i in range(len(ids)):
        ids[i] = b
        at[n], old[n] = 2 * m + b, links[2 * m + b]
        links[2 * m + b] = 1
        n += 1
        if links[3 * m + b]:
            at[n], old[n] = 3 * m + b, links[3 * m + b]
            links[3 * m + b] = 0
            n += 1
            lost += 1
        b = links[b]
    at[n], old[n] = 0, links[0]
    at[n + 1], old[n + 1] = m + b, links[m + b]
    links[0], links[m + b] = b, 0
    return n + 2, lost


def _hold(links, at, old, ids, m):
    """Add a holder; a free block leaves the list.  Returns how many were free."""
    n, revived = 0, 0
    for i in range(len(ids)):
        b = ids[i]
        at[n], old[n] = 2 * m + b, links[2 * m + b]
        links[2 * m + b] += 1
        n += 1
        if old[n - 1] == 0:
            before, after = links[m + b], links[b]
            at[n], old[n] = before, links[before]
            at[n + 1], old[n + 1] = m + after, links[m + after]
            links[before], links[m + after] = after, before
            n += 2
            revived += 1
    return n, revived


def _drop(links, at, old, ids, m):
    """Remove a holder; a block without one joins the list, at its front if nameless, else at its back."""
    n, freed = 0, 0
    for i in range(len(ids)):
        b = ids[i]
        at[n], old[n] = 2 * m + b, links[2 * m + b]
        links[2 * m + b] -= 1
        n += 1
        if links[2 * m + b] == 0:
            if links[3 * m + b]:
                before, after = links[m], 0
            else:
                before, after = 0, links[0]
            at[n], old[n] = b, links[b]
            at[n + 1], old[n + 1] = m + b, links[m + b]
            at[n + 2], old[n + 2] = before, links[before]
            at[n + 3], old[n + 3] = m + after, links[m + after]
            links[b], links[m + b] = after, before
            links[before] = b
            links[m + after] = b
            n += 4
            freed += 1
    return n, freed
