"""How compiled loops meet tensors: by address, because a numpy view of a small tensor costs more than the loop.

All loops are serial and compute each row on its own, so a row's bits do not depend on its batch mates.  The additions
of a reduction may be reassociated (that is what makes them vector code), in an order fixed by its length alone.
"""

from typing import Any

import numba
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

from afl.machine_code import kept

loops = kept(numba.njit, nogil=True, fastmath={"reassoc", "contract", "nsz"}, boundscheck=False)


def processor_has(feature: str) -> bool:
    """Whether loops are compiled for an x86 processor with that feature ("fma", "f16c"); other families have both."""
    context: Any = cpu_target.target_context
    triple, _, features = context.codegen().magic_tuple()
    return not triple.startswith(("x86_64", "i")) or f"+{feature}" in features.split(",")


def _pointer(kind: Any) -> Any:
    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.intp), build

    return cast


f32 = _pointer(types.float32)
i8 = _pointer(types.int8)
i32 = _pointer(types.int32)
f64 = _pointer(types.float64)


def rows_of(x: Tensor) -> tuple[int, int]:
    """Address and row stride, in elements, of a tensor whose rows are dense: the dimensions after the first one."""
    inner = 1
    for n, s in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if s != inner and n != 1:
            raise ValueError(f"rows of shape {list(x.shape)} are not dense: strides {x.stride()}")
        inner *= n
    return x.data_ptr(), x.stride(0)


def dense(x: Tensor) -> int:
    """Address of a contiguous tensor."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {list(x.shape)} is not contiguous: strides {x.stride()}")
    return x.data_ptr()
