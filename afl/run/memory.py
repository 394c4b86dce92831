"""How many cache blocks an engine gets, and the one effective limit on a sequence's length that follows."""

from typing import Any

import attrs
import torch

from afl.chip import Chip
from afl.config import EngineConfig
from afl.errors import ConfigError
from afl.run.ask import Ask, Budget, Violation
from afl.run.rules import block_tokens, refuse
from afl.sched import GroupSpec

SHARE = 4  # the cache may take a quarter of the host memory that is available


@attrs.frozen
class Pool:
    """Sizes of the paged cache.  `blocks` counts usable ones; the null block comes on top."""

    blocks: int
    block_tokens: int
    block_bytes: int
    max_model_len: int
    why: str

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.blocks * self.block_tokens

    @property
    def nbytes(self) -> int:
        return (self.blocks + 1) * self.block_bytes


def groups_of(caches: tuple[Any, ...], block_tokens: int) -> tuple[GroupSpec, ...]:
    """The cache groups of a model: layers of one kind (and window) share block tables; in order of first use."""
    kinds = [(c.kind if c.kind in ("window", "recurrent") else "full", getattr(c, "window", 0)) for c in caches]
    return tuple(GroupSpec(kind, block_tokens, window) for kind, window in dict.fromkeys(kinds))


def tokens_of_block(caches: tuple[Any, ...], chip: Chip, wish: int = 0) -> int:
    """Tokens of a cache block: the wish, or the chip's default, or the largest block below it that heads allow.

    Raises ConfigError for a wish that the chip does not have or that these heads are too large for.
    """
    found = block_tokens(max((c.head_size for c in caches), default=0), chip, wish)
    if isinstance(found, Violation):
        raise ConfigError(str(found))
    return found


def size_pool(
    caches: tuple[Any, ...], max_len: int, chip: Chip, dtype: torch.dtype, config: EngineConfig, free: int
) -> Pool:
    """The smaller of max_seqs x max_model_len tokens and a quarter of `free` bytes, unless kv_blocks is given.

    max_len: the longest sequence of the model.  The result's max_model_len is the smallest of it, the wish and what
    the pool holds.  Raises ConfigError with the figures when not even one block fits.
    """
    refuse(Ask(config, chip, caches=caches, max_len=max_len))
    size = tokens_of_block(caches, chip, config.block_tokens)
    block_bytes = sum(c.block_bytes(size, dtype) for c in caches)
    wish = config.max_model_len or max_len
    fraction = 1.0 if config.kv_blocks else 1 / SHARE
    budget = Budget(free, fraction, block=block_bytes, where="this host's available memory")
    refuse(Ask(config, budget=budget))
    all_rows = config.max_seqs * -(-wish // size)
    if config.kv_blocks:
        blocks, why = config.kv_blocks, "kv_blocks"
    else:
        blocks = min(all_rows, budget.blocks)
        why = "max_seqs x max_model_len" if blocks == all_rows else "a quarter of the available memory"
    return Pool(blocks, size, block_bytes, min(wish, blocks * size), why)
