"""Paged keys and values: the cache of multi-head and grouped-query attention."""

from typing import Any

import attrs
import torch
from torch import Tensor

from afl.chip import Chip
from afl.layout import Layout, layout, put_rows, register, strided_bytes
from afl.ops.attention import paged_attention, write_kv
from afl.tree import struct
from afl.types import TensorType

# caches whose dimensions lie in their logical order
BSND = register(Layout("bsnd", "nd", lambda shape, dtype: torch.empty(shape, dtype=dtype), put_rows,
                       lambda x: x.contiguous(), strided_bytes))


@struct
class PagedKV:
    """Keys and values of one layer, each [blocks, block_tokens, k, e]; block 0 is the null block."""

    k: Tensor
    v: Tensor


@attrs.frozen
class PagedKVSpec:
    """`k` kv heads of `e` channels."""

    k: int
    e: int
    kind: str = "full"

    @property
    def head_size(self) -> int:
        return self.e

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        return 2 * block_tokens * self.k * self.e * dtype.itemsize

    def types(self, chip: Chip, blocks: int, block_tokens: int, dtype: torch.dtype) -> Any:
        shape = blocks, block_tokens, self.k, self.e
        t = TensorType(shape, dtype, layout(chip.layouts.get("kv.paged", "bsnd")).fmt_of(shape))
        return PagedKV(t, t)  # type: ignore[arg-type]


def write(cache: PagedKV, k: Any, v: Any, batch: Any) -> PagedKV:
    """The cache with this step's keys and values [t k e] at the batch's slots."""
    return PagedKV(*write_kv(cache.k, cache.v, k, v, batch.slot[0]))


def attend(q: Any, cache: PagedKV, batch: Any, *, scale: float) -> Any:
    """Attention of q [t h e] over the cache: [t h e]."""
    return paged_attention(
        q, cache.k, cache.v, batch.blocks[0], batch.q_start, batch.kv_len, batch.q_start_h, batch.kv_len_h, scale=scale
    )
