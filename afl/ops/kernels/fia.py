"""Paged attention by npu_fused_infer_attention_score: prefill, chunks and decode in one call, layout TND."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from afl.chip import F
from afl.errors import AflError
from afl.ir.kernel import Update, kernel
from afl.ir.op import HALF
from afl.ops.attention import paged_attention
from afl.ops.vendor import npu
from afl.types import HostInts

RIGHT_DOWN_CAUSAL = 3                   # sparse_mode: the last query sees the last key
FIX_INVALID_ROWS = 2                    # inner_precise: zeros for a query that sees no key
MOST_GROUP, MOST_CHANNELS, MOST_PAGE = 64, 512, 65535


@functools.cache
def causal_mask(device: torch.device) -> Tensor:
    """int8 [2048, 2048], 1 above the diagonal: the template of the causal modes whatever the lengths; one a device."""
    with _disable_current_modes():      # a constant outlives whatever records or fakes this call
        return torch.ones(2048, 2048, dtype=torch.int8, device=device).triu(1)


def fits(q: Any, k_cache: Any, *rest: Any, scale: float) -> bool:
    """block of 128 to 512 tokens, a multiple of 128; channels a multiple of 16 up to 512; at most 64 heads a kv head"""
    b, s, k, e = k_cache.shape
    return s % 128 == 0 and s <= 512 and e % 16 == 0 and e <= MOST_CHANNELS and k * e <= MOST_PAGE and (
        q.shape[1] // k <= MOST_GROUP)


@functools.lru_cache(maxsize=16)        # every layer of a step asks for the same ones
def _lengths(t: int, q_start: HostInts, kv_len: HostInts) -> dict[str, list[int]]:
    starts, r = q_start.array, len(kv_len)
    total, ends, lens = int(starts[-1]), starts[1:].copy(), np.maximum(kv_len.array, 1)
    if t > r:
        ends, lens = np.append(ends, t), np.append(lens, 1)
    else:
        real = int(np.searchsorted(starts, total))          # rows behind it have no tokens
        ends[real:] = np.minimum(total + np.arange(1, r - real + 1), t)
        if r and ends[-1] != t:
            raise AflError(f"{t - total} padding tokens have no padding rows: q_start is {q_start.list}; a row has a "
                           "token unless it is padding, and padding rows come last")
    return {"actual_seq_lengths": ends.tolist(), "actual_seq_lengths_kv": lens.tolist()}


def lengths(q: Any, *rest: Any, scale: float) -> dict[str, list[int]]:
    """The vendor's two lists: running sums of query lengths, ending with the number of tokens; lengths of at least 1.

    How long they are follows from the numbers of tokens t and rows r alone, as a captured call needs it: with t > r one
    more request takes the padding tokens, of which there may be none; otherwise padding rows take one each.
    """
    return _lengths(q.shape[0], *rest[-2:])


UPDATE = Update("npu::npu_fused_infer_attention_score", ("actual_seq_lengths", "actual_seq_lengths_kv"), lengths)


@kernel(paged_attention, needs={F.FIA}, dtypes=HALF, when=fits, host=("q_start_h", "kv_len_h"), update=UPDATE,
        name="fia")
def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, q_start: Tensor, kv_len: Tensor,
    q_start_h: HostInts, kv_len_h: HostInts, *, scale: float,
) -> Tensor:
    """Padding tokens belong to requests that hold a single key of the null block; their results are zeroed.

    A step that is to be captured must be captured with padding tokens, or its graph does not zero them.
    """
    t, (b, s, k, e) = len(q), k_cache.shape
    given = lengths(q, k_cache, v_cache, blocks, q_start, kv_len, q_start_h, kv_len_h, scale=scale)
    if len(given["actual_seq_lengths"]) > len(blocks):
        blocks = torch.cat([blocks, blocks.new_zeros(1, blocks.shape[1])])
    padded = q_start_h.array[-1] < t
    out, _ = npu.npu_fused_infer_attention_score(
        q.contiguous(), k_cache.view(b, s, k * e), v_cache.view(b, s, k * e), atten_mask=causal_mask(q.device),
        **given, block_table=blocks.contiguous(), num_heads=q.shape[1],
        scale=scale, input_layout="TND", num_key_value_heads=k, sparse_mode=RIGHT_DOWN_CAUSAL,
        inner_precise=FIX_INVALID_ROWS if padded else 0, block_size=s,
    )
    if padded:
        real = torch.arange(t, device=q.device) < q_start[-1]
        out = torch.where(real[:, None, None], out, 0)
    return out
