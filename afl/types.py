"""Types of values in the IR: device tensors (`TensorType`) and per-step host vectors (`HostIntsType`)."""

from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "bool": torch.bool,
}
SHORT = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "b1",
}


@attrs.frozen(cache_hash=True)
class TensorType:
    """Shape and dtype of a device tensor.  `fmt` says how its bytes lie ("nd" plain); `shape` is always logical."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fmt: str = "nd"

    @property
    def nbytes(self) -> int:
        """Bytes of the logical elements; padding of a storage format is not counted."""
        n = self.dtype.itemsize
        for s in self.shape:
            n *= s
        return n

    def __str__(self) -> str:
        fmt = "" if self.fmt == "nd" else f":{self.fmt}"
        return f"{SHORT.get(self.dtype, str(self.dtype))}{fmt}[{','.join(map(str, self.shape))}]"


@attrs.frozen(cache_hash=True)
class HostIntsType:
    """A per-step int32 vector that lives on the host (sequence lengths and the like)."""

    size: int

    def __str__(self) -> str:
        return f"host[{self.size}]"


Type = TensorType | HostIntsType


class HostInts:
    """A frozen int32 vector on the host; `.list` and `.tensor` are converted once and kept.

    >>> HostInts([1, 2]).list
    [1, 2]
    """

    def __init__(self, values: Any) -> None:
        array = np.array(values, dtype=np.int32)  # a copy: the caller may reuse its buffer
        if array.ndim != 1:
            raise ValueError(f"HostInts is a vector, got shape {array.shape}")
        array.flags.writeable = False
        self.array: np.ndarray = array

    @classmethod
    def wrap(cls, array: np.ndarray) -> "HostInts":
        """Take an int32 vector that nobody writes any more, without a copy."""
        self = cls.__new__(cls)
        self.array = array
        return self

    @cached_property
    def list(self) -> list[int]:
        return self.array.tolist()

    @cached_property
    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.array.copy())

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"HostInts({self.array.tolist()})"


def type_of(x: Any) -> Type:
    """The type of a concrete value.  A tensor that carries `afl_fmt` (set by a layout) reports it."""
    if isinstance(x, torch.Tensor):
        return TensorType(tuple(x.shape), x.dtype, getattr(x, "afl_fmt", "nd"))
    if isinstance(x, HostInts):
        return HostIntsType(len(x))
    if isinstance(x, TensorType | HostIntsType):
        return x
    raise TypeError(f"neither a tensor nor HostInts: {type(x).__name__}")
