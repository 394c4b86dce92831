"""NZ, the storage of matrices and caches on Ascend's cube units: tiles of 16 rows, so that one tile is one load.

A matrix [R, C] lies as [C/16, R/16, 16, 16], both counts rounded up and the rest zero; bytes have 32 columns a tile.
A cache [b s k e] lies as [b, k*e/16, s, 16]: the channels of all heads are the columns, a block is not padded.

A weight [o, i] is stored as it stands, not transposed: npu_linear multiplies by the transpose of a weight [o, i] and
takes its format with it, while a transposed view of an NZ tensor has no format and would be unpacked first.  Vectors
and matrices with one row or one column stay plain: padding would make them sixteen times as large.
"""

import math

import torch
from torch import Tensor

from afl.layout import Layout, put_rows, register, strided_bytes

TILE = 16


def columns(dtype: torch.dtype) -> int:
    """Columns of a tile.  32 bit types have 16 of them, as torch_npu allocates them, and not 32 bytes' worth."""
    return 32 if dtype.itemsize == 1 else TILE


def stays_plain(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is not stored in NZ."""
    return len(shape) not in (2, 3, 4) or (len(shape) < 4 and 1 in shape[-2:])


def lies_as(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of the memory of a stored tensor.

    >>> lies_as((18, 20), torch.float16), lies_as((7, 128, 2, 64), torch.float16)
    ((2, 2, 16, 16), (7, 8, 128, 16))
    """
    n = columns(dtype)
    if len(shape) == 4:
        b, s, k, e = shape
        return b, -(-k * e // n), s, n
    *batch, rows, cols = shape
    return *batch, -(-cols // n), -(-rows // TILE), TILE, n


def memory(stored: Tensor) -> Tensor:
    """The memory of a stored tensor as it lies.  A cache without padding is viewed, also on a device."""
    form = lies_as(tuple(stored.shape), stored.dtype)
    if math.prod(form) == stored.numel():
        return stored.view(form)
    strides = [math.prod(form[i + 1 :]) for i in range(len(form))]
    return stored.as_strided(form, strides, 0)


def _matrices(stored: Tensor) -> Tensor:
    """The memory as [batch, tiles of columns, rows with padding, columns of a tile]: what the three kinds share."""
    m = memory(stored)
    return m if stored.dim() == 4 else m.flatten(-3, -2) if stored.dim() == 3 else m.flatten(-3, -2)[None]


def _rows_of(x: Tensor) -> Tensor:
    """A plain tensor as [batch, rows, columns]."""
    return x.flatten(2) if x.dim() == 4 else x if x.dim() == 3 else x[None]


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if stays_plain(shape):
        return torch.empty(shape, dtype=dtype)
    size = math.prod(lies_as(shape, dtype))
    made = torch.empty(size, dtype=dtype) if size == math.prod(shape) else torch.zeros(size, dtype=dtype)
    stored = made.as_strided(shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))])
    stored.afl_fmt = "nz"  # type: ignore[attr-defined]
    return stored


def _put(stored: Tensor, rows: Tensor, at: int) -> None:
    if not hasattr(stored, "afl_fmt"):
        put_rows(stored, rows, at)
        return
    m, x = _matrices(stored), _rows_of(rows)
    m = m[:, :, at : at + len(rows)] if stored.dim() == 2 else m[at : at + len(rows)]
    n = m.shape[-1]
    whole, rest = divmod(x.shape[-1], n)
    count = x.shape[1]
    if whole:
        m[:, :whole, :count] = x[..., : whole * n].unflatten(-1, (whole, n)).transpose(1, 2)
    if rest:
        m[:, whole, :count, :rest] = x[..., whole * n :]


def _back(stored: Tensor) -> Tensor:
    if not hasattr(stored, "afl_fmt"):
        return stored.contiguous()
    rows = stored.shape[1] if stored.dim() == 4 else stored.shape[-2]
    width = math.prod(stored.shape[2:]) if stored.dim() == 4 else stored.shape[-1]
    plain = _matrices(stored)[:, :, :rows].transpose(1, 2).flatten(2)[..., :width]
    return plain.reshape(stored.shape).contiguous()


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    if stays_plain(shape):
        return strided_bytes(shape, dtype)
    return math.prod(lies_as(shape, dtype)) * dtype.itemsize


NZ = register(Layout("nz", "nz", _empty, _put, _back, _bytes, stays_plain))
