"""Sizes that never change while a scheduler lives."""

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

import attrs
import numpy as np

from afl.errors import ConfigError, violations
from afl.sched.groups import GroupSpec, granularity, most_blocks


def _groups(values: Any) -> tuple[GroupSpec, ...]:
    given: Iterable[Any] = values or (GroupSpec(),)
    return tuple(g if isinstance(g, GroupSpec) else GroupSpec(**g) for g in given)


@attrs.frozen
class SchedConfig:
    """`blocks` counts usable blocks; block 0 is extra.

    >>> SchedConfig(4, 8, 32, 8, 4).blocks_for(9)
    3
    """

    max_seqs: int
    max_step_tokens: int
    max_model_len: int
    blocks: int
    block_tokens: int
    groups: tuple[GroupSpec, ...] = attrs.field(default=(), converter=_groups)
    prefix_cache: bool = False
    drafts: int = 0               # most draft tokens per row and step
    depth: int = 3                # most plans in flight
    host_blocks: int = 0          # blocks in host memory for swapped requests
    read_timeout: float = 480.0   # seconds after which blocks kept for readers are freed
    unit: int = attrs.field(init=False, eq=False, default=0)       # tokens per name of the prefix cache
    align: int = attrs.field(init=False, eq=False, default=0)      # block tokens of the recurrent groups, 0 = none
    cut: int = attrs.field(init=False, eq=False, default=0)        # where prompts are cut to keep states, 0 = nowhere
    width: int = attrs.field(init=False, eq=False, default=0)      # entries of the widest block table
    sliding: bool = attrs.field(init=False, eq=False, default=False)     # some group gives blocks back meanwhile
    sizes: np.ndarray = attrs.field(init=False, eq=False, repr=False, default=None)      # block tokens per group
    codes: np.ndarray = attrs.field(init=False, eq=False, repr=False, default=None)      # kind per group
    windows: np.ndarray = attrs.field(init=False, eq=False, repr=False, default=None)    # window per group

    def __attrs_post_init__(self) -> None:
        rows = [f"{n} must be at least 1, got {getattr(self, n)}"
                for n in ("max_seqs", "max_step_tokens", "max_model_len", "blocks", "block_tokens", "depth")
                if getattr(self, n) < 1]
        rows += [f"{n} must not be negative, got {getattr(self, n)}"
                 for n in ("drafts", "host_blocks", "read_timeout") if getattr(self, n) < 0]
        groups = tuple(attrs.evolve(g, block_tokens=g.block_tokens or self.block_tokens) for g in self.groups)
        states = {g.block_tokens for g in groups if g.kind == "recurrent"}
        if len(states) > 1:
            rows.append(f"recurrent groups have blocks of {sorted(states)} tokens; give them one size")
        if states and self.drafts:
            rows.append("drafts need a state per draft token, which recurrent groups do not keep; set drafts to 0")
        if rows:
            raise ConfigError(violations("scheduler sizes that do not hold", rows))
        sliding = any(g.kind != "full" for g in groups)
        widest = max(-(-self.max_model_len // g.block_tokens) for g in groups)
        values = dict(
            groups=groups, sliding=sliding, width=widest if sliding else min(self.blocks, widest),
            cut=max(states, default=0) if self.prefix_cache else 0, unit=gcd(*(g.block_tokens for g in groups)),
            align=max(states, default=0),
            sizes=np.array([g.block_tokens for g in groups], np.int32),
            codes=np.array([g.code for g in groups], np.int32), windows=np.array([g.window for g in groups], np.int32))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def granularity(self) -> int:
        """Tokens in steps of which prefixes are reused."""
        return granularity(self.groups)

    def blocks_for(self, tokens: int) -> int:
        """Blocks of the first group that hold `tokens` tokens."""
        return -(-int(tokens) // self.groups[0].block_tokens)

    def most(self, tokens: int) -> tuple[int, ...]:
        """Per group the most blocks that a sequence of `tokens` tokens holds at a time."""
        flying = self.depth * self.max_step_tokens
        return tuple(most_blocks(g, int(tokens), flying, self.depth) for g in self.groups)

    def record(self) -> dict[str, Any]:
        """As JSON values that `of` reads."""
        keep = [f.name for f in attrs.fields(SchedConfig) if f.init]
        return {n: getattr(self, n) for n in keep} | {"groups": [attrs.asdict(g) for g in self.groups]}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "SchedConfig":
        """From `record`."""
        return cls(**record)
