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
    """The memory of a stored [o, i] tensor as it lies: [o/32 rounded up, i, 32]."""
    o, i = stored.shape
    return stored.as_strided((-(-o // LANES), i, LANES), (i * LANES, LANES, 1), 0)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod((-(-shape[0] // LANES) * LANES, *shape[1:])) * dtype.itemsize


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    o, i = shape
    count = -(-o // LANES)
    memory = torch.empty((count, i, LANES), dtype=dtype)
    if o % LANES:
        memory[-1, :, o % LANES :] = 0
    stored = memory.as_strided((o, i), (i, 1))
    stored.afl_fmt = "panel"  # type: ignore[attr-defined]
    return stored


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


PANEL = register(Layout("panel", "panel", _empty, _put, _back, _bytes))
