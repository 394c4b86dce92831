"""Gated activations of the NPU chips."""

import torch
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.ops.act import swiglu
from afl.ops.vendor import npu

LANES = 16                                  # channels of half an operand must fill them on 310P


@kernel(swiglu, needs={F.NPU}, dtypes=HALF, name="npu_swiglu")
def _swiglu(x: Tensor) -> Tensor:
    """npu_swiglu: gate in the first half of the last dimension, which is a multiple of 32 or is filled up to one."""
    f = x.shape[-1] // 2
    if f % LANES == 0:
        return npu.npu_swiglu(x, -1)
    halves = torch.nn.functional.pad(x.unflatten(-1, (2, f)), (0, -f % LANES))
    return npu.npu_swiglu(halves.flatten(-2), -1)[..., :f]
