"""Rotation by given angles, on CPU: products and sum in float32, one rounding."""

import torch

from afl.ops.emu.register import emulate, require

MODES = ("half", "interleave")
MOST_CHANNELS, MOST = 896, 1000         # exclusive: channels of a head; batches, heads


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
    x = input.float()
    if rotary_mode == "half":
        turned = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return (x * r1.float() + turned * r2.float()).to(input.dtype)
