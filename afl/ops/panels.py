"""The storage of weights on host processors: panels of 32 outputs, so that a product reads memory once, in order.

A matrix [o, i] lies as [o/32, i, 32]: for each input the weights of 32 neighbouring outputs stand together and fill two
vector registers.  The last panel is filled up with zeros.
"""

import math

import torch
from torch import Tensor

from afl.layout import Layout, register

LANES = 32


def panels(stored: Tensor) -> Tensor:
    """The memory of a stored [o, i] tensor as it lies: [o/32 rounded up, i, 32], in "panel4" [.., i, 16]."""
    o, i = stored.shape
    lanes = LANES // 2 if stored.afl_fmt == "panel4" else LANES  # type: ignore[attr-defined]
    return stored.as_strided((-(-o // LANES), i, lanes), (i * lanes, lanes, 1), 0)


def _count(shape: tuple[int, ...]) -> int:
    return -(-shape[0] // LANES) * LANES * math.prod(shape[1:])


def _named(memory: Tensor, shape: tuple[int, ...], fmt: str) -> Tensor:
    """A stored tensor: the logical shape over this memory.  Packed memory is smaller, so all its strides are 0."""
    stored = memory.as_strided(shape, (0, 0) if fmt == "panel4" else (shape[1], 1))
    stored.afl_fmt = fmt  # type: ignore[attr-defined]
    return stored


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    o, i = shape
    memory = torch.empty((-(-o // LANES), i, LANES), dtype=dtype)
    if o % LANES:
        memory[-1, :, o % LANES :] = 0
    return _named(memory, shape, "panel")


def _put(stored: Tensor, rows: Tensor, at: int) -> None:
    """Panel by panel: the first and the last one may be filled in part."""
    memory, n = panels(stored), len(rows)
    first = min(n, -at % LANES)                                          # rows that complete a begun panel
    whole = (n - first) // LANES
    if first:
        memory[at // LANES, :, at % LANES : at % LANES + first] = rows[:first].T
    start = (at + first) // LANES
    if whole:
        done = first + whole * LANES
        memory[start : start + whole] = rows[first:done].unflatten(0, (whole, LANES)).transpose(1, 2)
    if first + whole * LANES < n:
        rest = rows[first + whole * LANES :]
        memory[start + whole, :, : len(rest)] = rest.T


def _back(stored: Tensor) -> Tensor:
    return panels(stored).transpose(1, 2).flatten(0, 1)[: stored.shape[0]].contiguous()


def _empty4(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _named(torch.zeros((-(-shape[0] // LANES), shape[1], LANES // 2), dtype=dtype), shape, "panel4")


def _put4(stored: Tensor, rows: Tensor, at: int) -> None:
    """Rows of numbers 0 to 15; panels that they fill in part keep their other rows."""
    if rows.numel() and int(rows.max()) > 15:
        raise ValueError("panel4 holds numbers of 4 bits, 0 to 15")
    if not len(rows):
        return
    half, first, last = LANES // 2, at // LANES, (at + len(rows) - 1) // LANES + 1
    packed = panels(stored)[first:last]                                   # a view: [panels, i, 16]
    wide = torch.cat([packed & 15, packed >> 4], 2).transpose(1, 2).flatten(0, 1)
    start = at - first * LANES
    wide[start : start + len(rows)] = rows
    lanes = wide.unflatten(0, (-1, LANES)).transpose(1, 2)
    packed.copy_(lanes[..., :half] | lanes[..., half:] << 4)


def _back4(stored: Tensor) -> Tensor:
    packed = panels(stored)
    return torch.cat([packed & 15, packed >> 4], 2).transpose(1, 2).flatten(0, 1)[: stored.shape[0]].contiguous()


PANEL = register(Layout(
    "panel", "panel", _empty, _put, _back, lambda shape, dtype: _count(shape) * dtype.itemsize,
))
# numbers of 4 bits, two a byte: lane l in the low half of byte l, lane l + 16 in its high half; uint8 on the outside
PANEL4 = register(Layout("panel4", "panel4", _empty4, _put4, _back4, lambda shape, dtype: _count(shape) // 2))
