"""Rotation by given angles, on CPU: products and sum in float32, one rounding."""

import torch
from torch import Tensor

from afl.ops.emu.register import emulate, require

MODES = ("half", "interleave")
MOST_CHANNELS, MOST = 896, 1000         # exclusive: channels of a head; batches, heads
APPLIED = (64, 128)                     # channels that npu_apply_rotary_pos_emb turns on every chip


@emulate("npu::npu_rotary_mul")
def _rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    """input * r1 + turned(input) * r2, where "half" turns (u, w) into (-w, u) and "interleave" does so with pairs.

    input [b s n d] (or another order of the first three); r1, r2 broadcast against it, cosines and sines per channel.
    """
    require(input.dtype in (torch.float16, torch.bfloat16, torch.float32), "input must be a float of 16 or 32 bits",
            input)
    require(r1.dtype == r2.dtype == input.dtype, "r1 and r2 must have input's dtype", r1, r2, input)
    require(input.dim() == 4 and r1.dim() == 4, "input and r1 must have 4 dimensions", input, r1)
    require(r1.shape == r2.shape, "r1 and r2 must have one shape", r1, r2)
    require(rotary_mode in MODES, f"rotary_mode must be one of {', '.join(MODES)}", rotary_mode)
    require(rotate is None, "rotate, a matrix in place of a mode, is not emulated", rotate)
    d = input.shape[-1]
    require(d % 2 == 0 and d < MOST_CHANNELS, f"the last dimension must be even and below {MOST_CHANNELS}", input)
    require(r1.shape[-1] == d, "the last dimension of r1 must be that of input", r1, input)
    fits = all(a in (1, b) for a, b in zip(r1.shape, input.shape, strict=True))
    require(fits and 1 in r1.shape[:3], "r1 must broadcast over at least the heads of input", r1, input)
    require(input.shape[0] < MOST and input.shape[2] < MOST, f"batches and heads must be below {MOST}", input)
    if rotary_mode == "interleave":
        require(input.shape[0] * input.shape[2] < MOST, f"batches times heads must be below {MOST}", input)
        require(r1.shape[0] == 1, "the first dimension of r1 must be 1 in this mode", r1)
    return _turn(input, r1, r2, rotary_mode == "half")


@emulate("npu::npu_apply_rotary_pos_emb")
def _apply_rotary_pos_emb(query, key, cos, sin, layout="BSND", rotary_mode="half"):
    """Rotate query [b s h d] and key [b s k d] by cos and sin [b s 1 d], and return them.

    Both are overwritten.  The schema does not say so; torch_npu returns the operands themselves.
    """
    require(layout == "BSND", 'only layout "BSND" is emulated', layout)
    require(rotary_mode == "half", 'rotary_mode must be "half"', rotary_mode)
    halves = (torch.float16, torch.bfloat16, torch.float32)
    require(query.dtype in halves, "query must be a float of 16 or 32 bits", query)
    require(query.dtype == key.dtype == cos.dtype == sin.dtype, "operands must have one dtype", query, key, cos, sin)
    require(query.dim() == key.dim() == cos.dim() == 4, "operands must have 4 dimensions", query, key, cos)
    require(query.shape[-1] in APPLIED, f"channels must be {' or '.join(map(str, APPLIED))}", query)
    b, s, _, d = query.shape
    require(key.shape[:2] == (b, s) and key.shape[3] == d, "query and key may differ in heads only", query, key)
    require(cos.shape == sin.shape == (b, s, 1, d), "cos and sin must be [b, s, 1, d] of query", cos, sin, query)
    dense = query.is_contiguous() and key.is_contiguous()
    require(dense, "query and key must be contiguous: they are overwritten", query, key)
    for x in (query, key):
        x.copy_(_turn(x, cos, sin, True))
    return query, key


def _turn(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    """x * cos + turned(x) * sin."""
    y, d = x.float(), x.shape[-1]
    if half:
        turned = torch.cat([-y[..., d // 2 :], y[..., : d // 2]], -1)
    else:
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    return (y * cos.float() + turned * sin.float()).to(x.dtype)
