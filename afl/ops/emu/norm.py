"""RMS norms of the vendor on CPU: sums and products in float32, one rounding at the end."""

import torch
from torch import Tensor

from afl.ops.emu.register import emulate, require

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@emulate("npu::npu_rms_norm")
def _rms_norm(input, gamma, epsilon=1e-6):
    """(gamma * input * rstd in input's dtype, rstd float32 with the normed dimensions 1)."""
    _check(input, gamma)
    return _norm(input.float(), gamma, epsilon, input.dtype)


@emulate("npu::npu_add_rms_norm")
def _add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    """(normed, rstd, x1 + x2).  The sum is rounded to x1's dtype and the rounded sum is normed.

    The documentation does not say which of the two sums is normed; a device may norm the one before rounding.
    """
    require(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 must agree in shape and dtype", x1, x2)
    _check(x1, gamma)
    total = (x1.float() + x2.float()).to(x1.dtype)
    return *_norm(total.float(), gamma, epsilon, x1.dtype), total


def _check(x: Tensor, gamma: Tensor) -> None:
    require(x.dtype in FLOATS, "the operand must be float16, bfloat16 or float32", x)
    require(gamma.dtype in (x.dtype, torch.float32), "gamma must have the operand's dtype or float32", gamma, x)
    require(1 <= x.dim() <= 8, "the operand must have 1 to 8 dimensions", x)
    fits = 1 <= gamma.dim() <= x.dim() and gamma.shape == x.shape[x.dim() - gamma.dim() :]
    require(fits, "gamma's shape must be the last dimensions of the operand's", gamma, x)


def _norm(x: Tensor, gamma: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    over = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + eps)
    return (x * rstd * gamma.float()).to(dtype), rstd
