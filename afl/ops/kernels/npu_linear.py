"""Matrix products of the NPU chips with plain weights."""

from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.ops.kernels.npu_norm import one_dtype
from afl.ops.linear import linear, logits
from afl.ops.vendor import npu


@kernel(linear, needs={F.NPU}, dtypes=HALF, when=one_dtype, name="npu_linear")
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """npu_linear: matrices and bias of one dtype, sums in float32, rounded once."""
    return npu.npu_linear(x, w, bias)


@kernel(logits, needs={F.NPU}, dtypes=HALF, when=one_dtype, name="npu_linear")
def _logits(x: Tensor, w: Tensor) -> Tensor:
    """npu_linear, widened: the vendor rounds the product to 16 bits, so logits are 16-bit values in float32."""
    return npu.npu_linear(x, w).float()
