"""Matrix products with weights in NZ: the vendor's operator reads the format off the tensor.

Only 310P has them: torch_npu refuses formats in npu_linear on 950, and on 910 none of them pays in 16 bits.  Its
npu_linear over NZ cannot be captured in a graph (torch_npu says so when it is), and of one token gives a result in NZ,
which torch_npu unpacks for the operators that follow.
"""

import torch
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ops.kernels.npu_norm import one_dtype
from afl.ops.linear import linear, logits
from afl.ops.vendor import npu

HALF = frozenset({torch.float16})


@kernel(linear, needs={F.ATB_NZ}, dtypes=HALF, when=one_dtype, fmt={"w": "nz"}, capturable=False,
        name="npu_linear_nz")
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """npu_linear with a weight [o, i] of format 29: matrices and bias of one dtype, rounded once."""
    return npu.npu_linear(x, w, bias)


@kernel(logits, needs={F.ATB_NZ}, dtypes=HALF, when=one_dtype, fmt={"w": "nz"}, capturable=False,
        name="npu_linear_nz")
def _logits(x: Tensor, w: Tensor) -> Tensor:
    """npu_linear, widened: the vendor rounds the product to 16 bits, so logits are 16-bit values in float32."""
    return npu.npu_linear(x, w).float()
