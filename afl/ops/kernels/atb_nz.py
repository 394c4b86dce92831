"""Attention and cache writes over NZ caches (`afl/ops/nz.py`): float16, heads of a multiple of 16 channels.

One operator, splitfuse, serves prefill, chunks and decode.  Others are made for one of them, but which one a step is
can be seen from its lengths only: a choice by them would be frozen in a captured program, where only the lengths of a
call are replaced.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ops.attention import paged_attention, write_kv
from afl.ops.nz import TILE, memory
from afl.ops.vendor import atb
from afl.types import HostInts

HALF = frozenset({torch.float16})
NZ = {"k_cache": "nz", "v_cache": "nz"}
MOST_HEAD, MOST_BLOCK_ELEMENTS = 256, 128 * 128     # what the vendor's library accepts
NORM_COMPRESS = 5                                   # mask_type


def _cache_fits(k_cache: Any) -> bool:
    s, e = k_cache.shape[1], k_cache.shape[3]
    return s % TILE == 0 and e % TILE == 0 and e <= MOST_HEAD and s * e <= MOST_BLOCK_ELEMENTS


def writes(k_cache: Any, *rest: Any) -> bool:
    """block of a multiple of 16 tokens; channels a multiple of 16 up to 256; block x channels at most 16384"""
    return _cache_fits(k_cache)


def attends(q: Any, k_cache: Any, *rest: Any, scale: float) -> bool:
    """block of a multiple of 16 tokens; channels a multiple of 16 up to 256; block x channels at most 16384"""
    return _cache_fits(k_cache)


@functools.cache
def causal_mask(device: torch.device) -> Tensor:
    """f16 [2048, 2048], -10000 above the diagonal: the template whatever the lengths; one a device."""
    with _disable_current_modes():      # a constant outlives whatever records or fakes this call
        return torch.full((2048, 2048), -10000.0, dtype=torch.float16, device=device).triu(1)


@kernel(write_kv, needs={F.ATB_NZ}, dtypes=HALF, when=writes, fmt=NZ, inplace={0: "k_cache", 1: "v_cache"},
        name="atb_nz")
def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """_npu_reshape_and_cache: rows are contiguous; slot -1 writes nothing."""
    atb._npu_reshape_and_cache(k.contiguous(), v.contiguous(), memory(k_cache), memory(v_cache), slot)
    return k_cache, v_cache


@kernel(paged_attention, needs={F.ATB_NZ}, dtypes=HALF, when=attends, fmt=NZ, host=("q_start_h", "kv_len_h"),
        capturable=False, name="atb_nz")
def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, q_start: Tensor, kv_len: Tensor,
    q_start_h: HostInts, kv_len_h: HostInts, *, scale: float,
) -> Tensor:
    """_npu_paged_attention_splitfuse_v2: tokens padded to a multiple of 16, both length vectors on the host.

    Padding tokens belong to no request; the vendor leaves anything in their results, which are zeroed.  A padding row
    has both lengths 0, which the vendor's library does not refuse.  Not to be captured: torch_npu cannot renew the
    lengths of this operator in a graph.
    """
    t = len(q)
    padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, -t % TILE)).contiguous()
    out = torch.empty_like(padded)
    atb._npu_paged_attention_splitfuse_v2(
        padded, memory(k_cache), memory(v_cache), blocks.contiguous(), kv_len_h.tensor, causal_mask(q.device),
        q_start_h.tensor.diff(), k_cache.shape[2], q.shape[1], scale, mask_type=NORM_COMPRESS, out=out,
    )
    real = torch.arange(t, device=q.device) < q_start[-1]
    return torch.where(real[:, None, None], out[:t], 0)
