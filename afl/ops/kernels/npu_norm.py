"""RMS norms of the NPU chips."""

from typing import Any

from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.ops.norm import add_rms_norm, rms_norm
from afl.ops.vendor import npu


def one_dtype(*types: Any, **params: Any) -> bool:
    """all operands of one dtype"""
    return len({t.dtype for t in types if t is not None}) == 1


@kernel(rms_norm, needs={F.NPU}, dtypes=HALF, when=one_dtype, name="npu_rms_norm")
def _rms_norm(x: Tensor, gamma: Tensor, *, eps: float) -> Tensor:
    """npu_rms_norm: gamma in the dtype of x; any strides."""
    return npu.npu_rms_norm(x, gamma, eps)[0]


@kernel(add_rms_norm, needs={F.NPU}, dtypes=HALF, when=one_dtype, name="npu_add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """npu_add_rms_norm: it may norm the rounded sum, which moves a result by the rounding of its operand."""
    y, _, total = npu.npu_add_rms_norm(x, residual, gamma, eps)
    return y, total
