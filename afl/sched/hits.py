"""The longest cached prefix of a sequence over all cache groups.

Each group can shorten the prefix to the longest end for which it has its own blocks; this repeats until no group
shortens it any more.  The length only falls, so it ends after at most one round per block.
"""

from collections.abc import Callable, Sequence

import attrs

from afl.sched.groups import GroupSpec, first_needed
from afl.sched.hashing import key
from afl.sched.pool import BORN, BlockPool


@attrs.frozen(eq=False)
class Hit:
    """`tokens` cached tokens; per group the blocks from `first` on.  junction: a longer prefix that some group has."""

    tokens: int = 0
    first: tuple[int, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()
    junction: int = 0


def longest(
    pool: BlockPool, groups: Sequence[GroupSpec], chain: Sequence[bytes], unit: int, cap: int, step: int,
) -> Hit:
    """The longest prefix of at most `cap` tokens that every group can serve.

    chain: names of the sequence's blocks of `unit` tokens.  step: the plan being made; a state (recurrent group) that
    this plan itself writes cannot be read by it.
    """
    if len(groups) == 1 and groups[0].kind == "full" and groups[0].block_tokens == unit:
        return _longest_full(pool, groups[0].block_tokens, chain, cap)
    born, known, seen = pool.part(BORN), pool.blocks, {}

    def block(g: int, i: int) -> int:
        """Block i of the prefix in group g; 0 if it is not cached."""
        at = seen.get((g, i))
        if at is None:
            at = known.get(key(chain[(i + 1) * groups[g].block_tokens // unit - 1], g), 0)
            seen[g, i] = at = 0 if at and groups[g].kind == "recurrent" and born[at] == step + 1 else at
        return at

    length, before, best = min(cap, len(chain) * unit), -1, 0
    while length and length != before:
        before = length
        for g, spec in enumerate(groups):
            length = _longest_of(spec, length, lambda i, g=g: block(g, i))
            if g == 0:
                best = max(best, length)
    if not length:
        return Hit(junction=best)
    first = tuple(first_needed(spec, length) for spec in groups)
    held = tuple(
        tuple(block(g, i) for i in range(first[g], length // spec.block_tokens)) for g, spec in enumerate(groups))
    return Hit(length, first, held, best if best > length else 0)


def _longest_full(pool: BlockPool, size: int, chain: Sequence[bytes], cap: int) -> Hit:
    """The same for the one group that most models have: walk the chain once."""
    known, blocks = pool.blocks.get, []
    for name in chain[: cap // size]:
        block = known(name)
        if block is None:
            break
        blocks.append(block)
    return Hit(len(blocks) * size, (0,), (tuple(blocks),)) if blocks else Hit()


def _longest_of(spec: GroupSpec, limit: int, block: Callable[[int], int]) -> int:
    """The longest prefix of at most `limit` tokens for which one group has its blocks."""
    size = spec.block_tokens
    if spec.kind == "full":
        n = 0
        while n < limit // size and block(n):
            n += 1
        return n * size
    n, run = limit // size, 0                      # candidate end, and blocks found before it, walking left
    while n and n - run > first_needed(spec, n * size):
        if block(n - run - 1):
            run += 1
        else:
            n, run = n - run - 1, 0
    return n * size
