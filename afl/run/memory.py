"""How many cache blocks an engine gets, and the one effective limit on a sequence's length that follows."""

from typing import Any

import attrs
import torch

from afl.chip import Chip
from afl.config import EngineConfig
from afl.errors import ConfigError
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
    default, allowed = chip.limits.block_tokens
    heads = max((c.head_size for c in caches), default=0)
    elements = chip.limits.block_elements
    most = elements // heads if elements and heads else max(default, wish, *allowed)
    if not wish:
        fitting = [n for n in (*allowed, default) if n <= min(default, most)]
        if not fitting:
            raise ConfigError(f"chip {chip.name!r} has no block for heads of {heads} channels: tokens of a block times "
                              f"channels are at most {elements}, its smallest block has {min(allowed)} tokens")
        return max(fitting)
    if allowed and wish not in allowed:
        raise ConfigError(
            f"block_tokens {wish} is not possible on chip {chip.name!r}: it has {', '.join(map(str, allowed))}"
        )
    if wish > most:
        raise ConfigError(
            f"block_tokens {wish} is too large for heads of {heads} channels on chip {chip.name!r}: tokens of a block "
            f"times channels are at most {elements}; ask for at most {most}"
        )
    return wish


def size_pool(
    caches: tuple[Any, ...], max_len: int, chip: Chip, dtype: torch.dtype, config: EngineConfig, free: int
) -> Pool:
    """The smaller of max_seqs x max_model_len tokens and a quarter of `free` bytes, unless kv_blocks is given.

    max_len: the longest sequence of the model.  The result's max_model_len is the smallest of it, the wish and what
    the pool holds.  Raises ConfigError with the figures when not even one block fits.
    """
    block_tokens = tokens_of_block(caches, chip, config.block_tokens)
    if config.max_model_len > max_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the model's {max_len} positions; ask for at most {max_len}"
        )
    block_bytes = sum(c.block_bytes(block_tokens, dtype) for c in caches)
    wish = config.max_model_len or max_len
    if config.kv_blocks:
        blocks, why = config.kv_blocks, "kv_blocks"
        if blocks * block_bytes > free:
            raise ConfigError(
                f"kv_blocks {blocks} need {blocks * block_bytes >> 20} MiB, {free >> 20} MiB are available; "
                f"ask for at most {free // block_bytes}"
            )
    else:
        all_rows = config.max_seqs * -(-wish // block_tokens)
        memory = free // SHARE // block_bytes - 1
        blocks = min(all_rows, memory)
        why = "max_seqs x max_model_len" if blocks == all_rows else "a quarter of the available memory"
        if blocks < 1:
            raise ConfigError(
                f"a quarter of the available {free >> 20} MiB does not hold two cache blocks of {block_bytes} bytes; "
                "free memory, or set kv_blocks and a smaller block_tokens"
            )
    return Pool(blocks, block_tokens, block_bytes, min(wish, blocks * block_tokens), why)
