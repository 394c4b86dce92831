"""Matrix products of the NPU chips with weights in NZ: the vendor's operator reads the format off the tensor."""

from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.ops.kernels.npu_norm import one_dtype
from afl.ops.linear import linear, logits
from afl.ops.vendor import npu


@kernel(linear, needs={F.NPU}, dtypes=HALF, when=one_dtype, fmt={"w": "nz"}, name="npu_linear_nz")
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """npu_linear with a weight [o, i] of format 29: matrices and bias of one dtype, rounded once."""
    return npu.npu_linear(x, w, bias)


@kernel(logits, needs={F.NPU}, dtypes=HALF, when=one_dtype, fmt={"w": "nz"}, name="npu_linear_nz")
def _logits(x: Tensor, w: Tensor) -> Tensor:
    """npu_linear, widened: the vendor rounds the product to 16 bits, so logits are 16-bit values in float32."""
    return npu.npu_linear(x, w).float()
