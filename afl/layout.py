"""How a weight's bytes lie on a chip.  A layout preserves values: `back(to(x))` is x.

A stored tensor has the logical shape, so that types and shapes never change with the chip; when its bytes lie otherwise
its `afl_fmt` says how, and only kernels that declare that format read it.  Everyone else goes through `back`.
"""

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from afl.errors import ConfigError, unknown
from afl.types import TensorType


@attrs.frozen
class Layout:
    """A storage format of tensors; `name` is also what `Chip.layouts` calls it.

    empty: an uninitialised stored tensor of a logical shape.  put: writes logical rows at a row of the first dimension.
    back: a plain tensor of the same values.  nbytes: bytes that a logical shape takes, padding included.
    fmt: TensorType.fmt of stored tensors; "nd" when strides alone describe them.  stays_plain: shapes that are not
    stored so: their format is "nd", and the other functions treat them as plain.
    """

    name: str
    fmt: str
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor]
    put: Callable[[Tensor, Tensor, int], None]
    back: Callable[[Tensor], Tensor]
    nbytes: Callable[[tuple[int, ...], torch.dtype], int]
    stays_plain: Callable[[tuple[int, ...]], bool] = lambda shape: False

    def fmt_of(self, shape: tuple[int, ...]) -> str:
        """TensorType.fmt of a stored tensor of this shape."""
        return "nd" if self.stays_plain(shape) else self.fmt

    def types(self, shape: tuple[int, ...], dtype: torch.dtype) -> TensorType:
        """The type of a stored tensor."""
        return TensorType(shape, dtype, self.fmt)

    def to(self, x: Tensor) -> Tensor:
        """x stored in this layout; always a copy."""
        made = self.empty(tuple(x.shape), x.dtype)
        self.put(made, x, 0)
        return made


@attrs.frozen
class As:
    """A layout whose tensors have this dtype, whatever is asked for."""

    layout: Layout
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def put(self) -> Callable[[Tensor, Tensor, int], None]:
        return self.layout.put

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.layout.empty(shape, self.dtype)

    def types(self, shape: tuple[int, ...], dtype: torch.dtype) -> TensorType:
        return self.layout.types(shape, self.dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return self.layout.nbytes(shape, self.dtype)

    def to(self, x: Tensor) -> Tensor:
        return self.layout.to(x.to(self.dtype))


_LAYOUTS: dict[str, Layout] = {}


def register(made: Layout) -> Layout:
    """Make a layout known by its name."""
    if made.name in _LAYOUTS and _LAYOUTS[made.name] is not made:
        raise ConfigError(f"layout {made.name!r} is defined twice; rename one of the two")
    _LAYOUTS[made.name] = made
    return made


def layout(name: str) -> Layout:
    """The layout of that name."""
    if name not in _LAYOUTS:
        raise ConfigError(unknown("layout", name, _LAYOUTS))
    return _LAYOUTS[name]


def registered() -> dict[str, Layout]:
    """All layouts by name."""
    return dict(_LAYOUTS)


def plain(x: Any) -> Any:
    """A stored tensor as a plain one; anything else as it is."""
    fmt = getattr(x, "afl_fmt", "nd")
    if fmt == "nd":
        return x
    return _of_fmt(fmt).back(x)


def stored_bytes(x: Any) -> int:
    """Bytes that a tensor takes, or that one of this type would take, padding included."""
    if isinstance(x, TensorType):
        return next(made for made in _LAYOUTS.values() if made.fmt == x.fmt).nbytes(x.shape, x.dtype)
    return x.untyped_storage().nbytes() if hasattr(x, "afl_fmt") else x.nbytes


def copy(x: Tensor) -> Tensor:
    """A copy that is stored as x is, padding included."""
    if not hasattr(x, "afl_fmt"):
        return x.clone()
    memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage().clone())
    made = memory.as_strided(x.shape, x.stride(), x.storage_offset())
    made.afl_fmt = x.afl_fmt  # type: ignore[attr-defined]
    return made


def zeros(shape: tuple[int, ...], dtype: torch.dtype, fmt: str) -> Tensor:
    """Stored zeros whose pages the system hands out on first write: a cache costs what it holds, not what it could.

    Zero bytes are zeros in every format.
    """
    made = _of_fmt(fmt)
    memory = torch.from_numpy(np.zeros(made.nbytes(shape, dtype), np.uint8))
    stored = made.empty(shape, dtype)           # for its strides and its format
    return stored.set_(memory.untyped_storage(), 0, stored.shape, stored.stride())


def _of_fmt(fmt: str) -> Layout:
    return next(made for made in _LAYOUTS.values() if made.fmt == fmt)


def strided_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor without padding."""
    return math.prod(shape) * dtype.itemsize


def put_rows(stored: Tensor, rows: Tensor, at: int) -> None:
    """`put` of every layout that is only a choice of strides."""
    if stored.dim():
        stored.narrow(0, at, rows.shape[0]).copy_(rows)
    else:
        stored.copy_(rows.reshape(()))


ND = register(Layout("nd", "nd", lambda shape, dtype: torch.empty(shape, dtype=dtype), put_rows,
                     lambda x: x.contiguous(), strided_bytes))
