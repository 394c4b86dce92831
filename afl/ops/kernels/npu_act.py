"""Gated activations of the NPU chips."""

from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.ops.act import swiglu
from afl.ops.vendor import npu


@kernel(swiglu, needs={F.NPU}, dtypes=HALF, name="npu_swiglu")
def _swiglu(x: Tensor) -> Tensor:
    """npu_swiglu: gate in the first half of the last dimension."""
    return npu.npu_swiglu(x, -1)
