"""Rotary embedding of the NPU chips, and its fusion with the split before and the cache write behind it.

npu_rotary_mul turns any number of channels, halves or pairs; as q and k lie side by side in a fused projection, one
call does the heads of both.  On 310P it knows halves only and cannot be captured for 64, 128, ... channels, so there
npu_apply_rotary_pos_emb is used, which takes 64 or 128 channels in halves and overwrites its operands.
"""

from typing import Any

import torch
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.ops.fused import qkv_rope_write
from afl.ops.kernels.npu_cache import scatter
from afl.ops.rope import rope
from afl.ops.vendor import npu

MOST_CHANNELS, MOST_HEADS = 896, 1000       # exclusive
APPLIED = (64, 128)                         # widths of npu_apply_rotary_pos_emb


def _fits(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> bool:
    """fewer than 896 rotated channels, fewer than 1000 heads"""
    return 2 * cos.shape[1] < MOST_CHANNELS and x.shape[1] < MOST_HEADS


def _few(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> bool:
    """at most 128 rotated channels"""
    return 2 * cos.shape[1] <= APPLIED[-1]


def _qkv_fits(qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, slot: Any, *, h: int, e: int,
              interleaved: bool) -> bool:
    """fewer than 896 rotated channels, fewer than 1000 heads of q and k together"""
    return 2 * cos.shape[1] < MOST_CHANNELS and h + k_cache.shape[2] < MOST_HEADS


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """npu_rotary_mul over [1, t, h, 2p]: cosines and sines in the dtype of x and as wide as what they turn.

    The other channels of x [t h e], if any, are joined on.
    """
    width = 2 * cos.shape[1]
    c, s = (_wide(a.to(x.dtype), interleaved) for a in (cos, sin))
    y = npu.npu_rotary_mul(x[None, ..., :width], c, s, "interleave" if interleaved else "half")[0]
    return y if width == x.shape[2] else torch.cat([y, x[..., width:]], -1)


def _wide(a: Tensor, interleaved: bool) -> Tensor:
    """Per-pair numbers [t p] for both channels of each pair: [1, t, 1, 2p]."""
    both = torch.stack([a, a], -1).flatten(-2) if interleaved else torch.cat([a, a], -1)
    return both[None, :, None]


@kernel(rope, needs={F.NPU, F.ROTARY_MUL}, dtypes=HALF, when=_fits, name="npu_rotary_mul", priority=1)
def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    return rotated(x, cos, sin, interleaved)


@kernel(rope, needs={F.NPU}, dtypes=HALF, when=_few, name="npu_apply_rotary")
def _rope_in_place(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """npu_apply_rotary_pos_emb on a copy: first and second of each pair as halves, both filled up to 32 or 64 channels.

    The operator wants a query and a key: the copy is the one, a head of zeros the other.
    """
    t, h, e = x.shape
    p = cos.shape[1]
    half = next(n for n in APPLIED if 2 * p <= n) // 2
    first, second = (x[..., : 2 * p : 2], x[..., 1 : 2 * p : 2]) if interleaved else (x[..., :p], x[..., p : 2 * p])
    query = torch.nn.functional.pad(torch.stack([first, second], 2), (0, half - p)).view(1, t, h, 2 * half)
    c, s = (torch.nn.functional.pad(a.to(x.dtype), (0, half - p)).repeat(1, 2)[None, :, None] for a in (cos, sin))
    query, _ = npu.npu_apply_rotary_pos_emb(query, torch.zeros_like(query[:, :, :1]), c, s, "BSND", "half")
    y = query.view(t, h, 2, half)[..., :p]
    y = y.transpose(2, 3).flatten(2) if interleaved else y.flatten(2)
    return y if 2 * p == e else torch.cat([y, x[..., 2 * p :]], -1)


@kernel(qkv_rope_write, needs={F.NPU, F.ROTARY_MUL, F.SCATTER_PA}, dtypes=HALF, when=_qkv_fits,
        inplace={1: "k_cache", 2: "v_cache"}, name="npu_rotary_mul")
def _qkv_rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot: Tensor, *, h: int, e: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One npu_rotary_mul for q and k, then npu_scatter_pa_kv_cache."""
    k = k_cache.shape[2]
    both = rotated(qkv[:, : (h + k) * e].unflatten(1, (h + k, e)), cos, sin, interleaved)
    value = qkv[:, (h + k) * e :].unflatten(1, (k, e))
    return both[:, :h], *scatter(k_cache, v_cache, both[:, h:], value, slot)
