"""Rotary embedding of the NPU chips, and its fusion with the split before and the cache write behind it.

npu_apply_rotary_pos_emb would do q and k in one call, but it overwrites both, which its schema does not say.  As q and
k lie side by side in a fused projection, one npu_rotary_mul turns the heads of both.
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


def _fits(cos: Any, heads: int) -> bool:
    return 2 * cos.shape[1] < MOST_CHANNELS and heads < MOST_HEADS


def _halves_fit(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> bool:
    """halves; fewer than 896 rotated channels, fewer than 1000 heads"""
    return not interleaved and _fits(cos, x.shape[1])


def _pairs_fit(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> bool:
    """pairs; fewer than 896 rotated channels, fewer than 1000 heads"""
    return interleaved and _fits(cos, x.shape[1])


def _qkv_fits(qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, slot: Any, *, h: int, e: int,
              interleaved: bool) -> bool:
    """fewer than 896 rotated channels, fewer than 1000 heads of q and k together"""
    return _fits(cos, h + k_cache.shape[2])


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


def _turned(x: Tensor, groups: int) -> Tensor:
    """The last dimension read as a matrix of `groups` rows and written by columns."""
    return x.unflatten(-1, (groups, -1)).transpose(-1, -2).flatten(-2)


@kernel(rope, needs={F.NPU}, dtypes=HALF, when=_halves_fit, name="npu_rotary_mul")
def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    return rotated(x, cos, sin, False)


@kernel(rope, needs={F.NPU, F.ROTARY_PAIRS}, dtypes=HALF, when=_pairs_fit, name="npu_rotary_mul_pairs", priority=1)
def _rope_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    return rotated(x, cos, sin, True)


@kernel(rope, needs={F.NPU}, dtypes=HALF, when=_pairs_fit, name="npu_rotary_mul_sorted")
def _rope_sorted(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """For chips whose npu_rotary_mul knows halves only: the first of each pair in front, rotate, put back."""
    width, p = 2 * cos.shape[1], cos.shape[1]
    y = _turned(rotated(_turned(x[..., :width], p), cos, sin, False), 2)
    return y if width == x.shape[2] else torch.cat([y, x[..., width:]], -1)


@kernel(qkv_rope_write, needs={F.NPU, F.ROTARY_PAIRS, F.SCATTER_PA}, dtypes=HALF, when=_qkv_fits,
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
