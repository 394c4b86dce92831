"""Cache groups: layers that share block tables, and which blocks a sequence needs in each of them.

    full        every block from the first token on
    window      the blocks that hold the last `window` - 1 tokens before the next one
    recurrent   the one block that holds the state at the next token; a state exists only where a chunk ended

A block id serves any group: all groups draw on one pool.  What a group needs depends on its kind only, so a prefix
counts as cached as soon as each group holds its own blocks for it, and no common multiple of block sizes is involved
beyond the blocks themselves.
"""

from collections.abc import Sequence

import attrs

from afl.errors import ConfigError, unknown

FULL, WINDOW, RECURRENT = range(3)
KINDS = ("full", "window", "recurrent")


@attrs.frozen
class GroupSpec:
    """One cache group.  block_tokens 0: that of the configuration."""

    kind: str = "full"
    block_tokens: int = 0
    window: int = 0

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(unknown("cache group kind", self.kind, KINDS))
        if (self.kind == "window") != (self.window > 0):
            raise ConfigError(f"a {self.kind} group has window {self.window}; only window groups have one, at least 1")

    @property
    def code(self) -> int:
        """Index into KINDS, for compiled loops."""
        return KINDS.index(self.kind)


def unneeded(spec: GroupSpec, done: int) -> int:
    """Number of leading blocks that nobody reads once `done` tokens are computed.

    >>> [unneeded(GroupSpec("window", 4, 6), n) for n in (0, 8, 9, 12, 13)]
    [0, 0, 1, 1, 2]
    >>> [unneeded(GroupSpec("recurrent", 4), n) for n in (0, 4, 5, 8)]
    [0, 0, 1, 1]
    """
    if spec.kind == "window":
        return max(0, done - spec.window + 1) // spec.block_tokens
    return max(0, done - 1) // spec.block_tokens if spec.kind == "recurrent" else 0


def first_needed(spec: GroupSpec, hit: int) -> int:
    """The first block that a group must hold so that `hit` cached tokens (a multiple of its blocks) can be used.

    >>> [first_needed(GroupSpec(k, 4, w), 16) for k, w in (("full", 0), ("window", 6), ("recurrent", 0))]
    [0, 2, 3]
    """
    return unneeded(spec, hit)


def most_blocks(spec: GroupSpec, tokens: int, in_flight: int, depth: int) -> int:
    """Most blocks that a sequence of `tokens` tokens holds at a time while at most `in_flight` tokens are in flight.

    >>> [most_blocks(GroupSpec(k, 4, w), 100, 8, 2) for k, w in (("full", 0), ("window", 6), ("recurrent", 0))]
    [25, 5, 3]
    """
    blocks = -(-tokens // spec.block_tokens)
    if spec.kind == "window":
        return min(blocks, -(-(spec.window - 1 + in_flight) // spec.block_tokens) + 1)
    return min(blocks, depth + 1) if spec.kind == "recurrent" else blocks


def granularity(groups: Sequence[GroupSpec]) -> int:
    """Tokens in steps of which prefixes can be reused: the smallest length whose end is a block end in every group.

    A configuration states it at start-up, so that prompts shorter than it are known never to hit.
    """
    size = groups[0].block_tokens
    for g in groups[1:]:
        a, b = size, g.block_tokens
        while b:
            a, b = b, a % b
        size = size // a * g.block_tokens
    return size
