"""Paged attention by npu_fused_infer_attention_score: prefill, chunks and decode in one call, layout TND."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from afl.chip import F
from afl.ir.kernel import kernel
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


@kernel(paged_attention, needs={F.FIA}, dtypes=HALF, when=fits, host=("q_start_h", "kv_len_h"), name="fia")
def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, q_start: Tensor, kv_len: Tensor,
    q_start_h: HostInts, kv_len_h: HostInts, *, scale: float,
) -> Tensor:
    """Padding tokens become one more request that holds a single key of the null block; their results are zeroed.

    The vendor wants actual_seq_lengths to end with the number of tokens, and lengths of at least 1.  A step that is to
    be captured must be captured with padding tokens: the added request may be empty when it is replayed.
    """
    t, (b, s, k, e) = len(q), k_cache.shape
    ends, lens = q_start_h.list[1:], kv_len_h.list
    if 0 in lens:
        lens = [max(1, n) for n in lens]
    padded = q_start_h.list[-1] < t
    if padded:
        ends, lens = [*ends, t], [*lens, 1]
        blocks = torch.cat([blocks, blocks.new_zeros(1, blocks.shape[1])])
    out, _ = npu.npu_fused_infer_attention_score(
        q.contiguous(), k_cache.view(b, s, k * e), v_cache.view(b, s, k * e), atten_mask=causal_mask(q.device),
        actual_seq_lengths=ends, actual_seq_lengths_kv=lens, block_table=blocks.contiguous(), num_heads=q.shape[1],
        scale=scale, input_layout="TND", num_key_value_heads=k, sparse_mode=RIGHT_DOWN_CAUSAL,
        inner_precise=FIX_INVALID_ROWS if padded else 0, block_size=s,
    )
    if padded:
        real = torch.arange(t, device=q.device) < q_start[-1]
        out = torch.where(real[:, None, None], out, 0)
    return out
