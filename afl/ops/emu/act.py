"""Gated activations of the vendor on CPU: float32 inside, one rounding."""

import torch

from afl.ops.emu.register import emulate, require


@emulate("npu::npu_swiglu")
def _swiglu(input, dim=-1):
    """silu(first half) * second half along `dim`."""
    require(input.dtype in (torch.float16, torch.bfloat16, torch.float32), "input must be a float of 16 or 32 bits",
            input)
    require(-input.dim() <= dim < input.dim(), "dim must be a dimension of input", dim, input)
    require(input.shape[dim] % 2 == 0, "the split dimension must be even", input, dim)
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)
