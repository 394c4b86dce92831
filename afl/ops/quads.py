"""The storage of small integers for products in integers: panels of 32 outputs whose inputs stand in fours.

A matrix [o, i] lies as [o/32, i/4, 32, 4]: the processor multiplies four neighbouring bytes of one output with four of
the activations and adds them up at once.  Numbers of 4 bits lie as [o/32, i/4, 16, 4] bytes, output l in the low half,
output l + 16 in the high half.  Inputs are filled up with zeros to whole groups of 32, outputs to whole panels.
"""

import torch
from torch import Tensor

from afl.layout import Layout, register
from afl.ops.panels import LANES

GROUP, QUAD = 32, 4
QUADS, QUADS4 = "panel-quad", "panel-quad4"


def quads(stored: Tensor) -> Tensor:
    """The memory of a stored [o, i] tensor as it lies: [o/32 rounded up, i/4, 32 (4 bits: 16), 4]."""
    n = _sizes(tuple(stored.shape), stored.afl_fmt)  # type: ignore[attr-defined]
    return stored.as_strided(n, (n[1] * n[2] * QUAD, n[2] * QUAD, QUAD, 1), 0)


def _sizes(shape: tuple[int, ...], fmt: str) -> tuple[int, int, int, int]:
    o, i = shape
    return -(-o // LANES), -(-i // GROUP) * GROUP // QUAD, LANES // 2 if fmt == QUADS4 else LANES, QUAD


def _nbytes(shape: tuple[int, ...], fmt: str) -> int:
    p, q, lanes, four = _sizes(shape, fmt)
    return p * q * lanes * four


def _empty(shape: tuple[int, ...], dtype: torch.dtype, fmt: str) -> Tensor:
    stored = torch.zeros(_sizes(shape, fmt), dtype=dtype).as_strided(shape, (0, 0))     # strides that nobody reads
    stored.afl_fmt = fmt  # type: ignore[attr-defined]
    return stored


def _wide(memory: Tensor, fmt: str) -> Tensor:
    """Rows [panels * 32, inputs] of memory, a copy."""
    if fmt == QUADS4:
        memory = torch.cat([memory & 15, memory >> 4], 2)
    return memory.transpose(1, 2).flatten(2).flatten(0, 1)


def _put(stored: Tensor, rows: Tensor, at: int, fmt: str) -> None:
    """Panels that the rows fill in part keep their other rows."""
    if not rows.numel():
        return
    if fmt == QUADS4 and int(rows.max()) > 15:
        raise ValueError(f"{fmt} holds numbers of 4 bits, 0 to 15")
    first, last = at // LANES, (at + len(rows) - 1) // LANES + 1
    memory = quads(stored)[first:last]
    start = at - first * LANES
    if start or len(rows) != LANES * (last - first):
        wide = _wide(memory, fmt)
    else:
        wide = torch.zeros(len(rows), memory.shape[1] * QUAD, dtype=rows.dtype)
    wide[start : start + len(rows), : rows.shape[1]] = rows
    lanes = wide.view(len(memory), LANES, -1, QUAD).transpose(1, 2)
    half = LANES // 2
    memory.copy_(lanes[:, :, :half] | lanes[:, :, half:] << 4 if fmt == QUADS4 else lanes)


def _back(stored: Tensor) -> Tensor:
    o, i = stored.shape
    return _wide(quads(stored), stored.afl_fmt)[:o, :i].contiguous()  # type: ignore[attr-defined]


def _layout(fmt: str) -> Layout:
    return register(Layout(
        fmt, fmt, lambda shape, dtype: _empty(shape, dtype, fmt), lambda stored, rows, at: _put(stored, rows, at, fmt),
        _back, lambda shape, dtype: _nbytes(shape, fmt),
    ))


PANEL_QUAD, PANEL_QUAD4 = _layout(QUADS), _layout(QUADS4)
