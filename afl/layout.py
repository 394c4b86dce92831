"""How a weight's bytes lie on a chip.  A layout preserves values: `back(to(x))` is x.

A stored tensor has the logical shape, so that types and shapes never change with the chip; when its bytes lie otherwise
its `afl_fmt` says how, and only kernels that declare that format read it.  Everyone else goes through `back`.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from afl.errors import ConfigError, unknown


@attrs.frozen
class Layout:
    """A storage format of matrices [.., o, i].

    empty: an uninitialised stored tensor of a logical shape.  put: writes logical rows at a row of the first dimension.
    back: a plain tensor of the same values.  nbytes: bytes that a logical shape takes, padding included.
    fmt: TensorType.fmt of stored tensors; "nd" when strides alone describe them.
    """

    name: str
    fmt: str
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor]
    put: Callable[[Tensor, Tensor, int], None]
    back: Callable[[Tensor], Tensor]
    nbytes: Callable[[tuple[int, ...], torch.dtype], int]

    def to(self, x: Tensor) -> Tensor:
        """x stored in this layout; always a copy."""
        made = self.empty(tuple(x.shape), x.dtype)
        self.put(made, x, 0)
        return made


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
    return next(made for made in _LAYOUTS.values() if made.fmt == fmt).back(x)


def copy(x: Tensor) -> Tensor:
    """A copy that is stored as x is, padding included."""
    if not hasattr(x, "afl_fmt"):
        return x.clone()
    memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage().clone())
    made = memory.as_strided(x.shape, x.stride(), x.storage_offset())
    made.afl_fmt = x.afl_fmt  # type: ignore[attr-defined]
    return made


def strided_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor without padding."""
    n = dtype.itemsize
    for s in shape:
        n *= s
    return n


def put_rows(stored: Tensor, rows: Tensor, at: int) -> None:
    """`put` of every layout that is only a choice of strides."""
    if stored.dim():
        stored.narrow(0, at, rows.shape[0]).copy_(rows)
    else:
        stored.copy_(rows.reshape(()))


ND = register(Layout("nd", "nd", lambda shape, dtype: torch.empty(shape, dtype=dtype), put_rows,
                     lambda x: x.contiguous(), strided_bytes))
