"""How a weight's bytes lie on a chip.  A layout preserves values: `back(to(x))` is x."""

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from afl.errors import ConfigError, unknown


@attrs.frozen
class Layout:
    """A storage format.  `empty` allocates a tensor of logical shape that a loader fills slice by slice."""

    name: str
    fmt: str                                                             # TensorType.fmt of stored tensors
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor]
    to: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def _col_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))


def _col(x: Tensor) -> Tensor:
    return _col_empty(tuple(x.shape), x.dtype).copy_(x)


LAYOUTS = {
    "nd": Layout("nd", "nd", lambda s, d: torch.empty(s, dtype=d), lambda x: x.contiguous(), lambda x: x.contiguous()),
    # input-major: element [o, i] at i * o_size + o.  Only strides differ, so every op reads it; the type stays "nd"
    "col": Layout("col", "nd", _col_empty, _col, lambda x: x.contiguous()),
}


def layout(name: str) -> Layout:
    """The layout of that name."""
    if name not in LAYOUTS:
        raise ConfigError(unknown("layout", name, LAYOUTS))
    return LAYOUTS[name]
