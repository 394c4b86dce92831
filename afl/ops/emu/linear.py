"""Matrix products of the vendor on CPU: sums in float32, one rounding to the operands' dtype."""

import torch

from afl.ops.emu.product import multiply
from afl.ops.emu.register import emulate, require


@emulate("npu::npu_linear")
def _linear(input, weight, bias=None):
    """input [t i] @ weight [o i] transposed + bias [o].  A weight in a storage format is read in that format."""
    require(input.dtype in (torch.float16, torch.bfloat16, torch.float32), "input must be a float of 16 or 32 bits",
            input)
    require(input.dim() == 2 and weight.dim() == 2, "input and weight must be matrices", input, weight)
    require(weight.dtype == input.dtype, "weight must have input's dtype", weight, input)
    require(weight.shape[1] == input.shape[1], "weight must have as many columns as input", weight, input)
    if bias is not None:
        require(bias.shape == weight.shape[:1], "bias must have one number per row of weight", bias, weight)
        require(bias.dtype == input.dtype, "bias must have input's dtype", bias, input)
    y = multiply(input, weight)
    return (y if bias is None else y.add_(bias)).to(input.dtype)
