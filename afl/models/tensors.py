"""Tensors of a checkpoint file, whatever its format: what is in it (`TensorInfo`) and rows of it on demand.

Nothing is held: rows come out of a memory map in chunks, so a load needs the destination and one chunk.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import attrs
import torch

from afl.errors import CheckpointError
from afl.types import DTYPES

CHUNK_ELEMENTS = 1 << 19    # elements converted at a time
MAX_ELEMENTS = 1 << 48      # beyond any file; keeps products of dimensions far from 64 bits
MAX_DIMS = 8


@attrs.frozen
class TensorInfo:
    """One entry: logical shape, the dtype that reading gives, the file's own type name, and the file."""

    shape: tuple[int, ...]
    dtype: str              # "bfloat16", "float32", ...: what `rows` returns
    stored: str             # "BF16", "Q4_1", ...: how the file holds it
    file: Path

    def __str__(self) -> str:
        return f"{self.stored}{list(self.shape)} in {self.file.name}"


class TensorStore(Protocol):
    """The tensors of a checkpoint under Hugging Face names."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What there is; known from headers alone."""
        ...

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) along the first dimension.  Do not write to the result: it may view the file."""
        ...


def chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, stop) ranges of the first dimension, each of about CHUNK_ELEMENTS elements and at least one row.

    >>> list(chunks((3, 1 << 18)))
    [(0, 2), (2, 3)]
    """
    step = max(1, CHUNK_ELEMENTS // max(1, math.prod(shape[1:])))
    rows = shape[0] if shape else 1     # a scalar counts as one row
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def read(store: TensorStore, name: str) -> torch.Tensor:
    """A fresh copy of one tensor in the dtype that the checkpoint gives."""
    info = store.tensors[name]
    if info.dtype not in DTYPES:
        raise CheckpointError(f"{name}: {info} has a dtype that is not supported")
    dest = torch.empty(info.shape, dtype=DTYPES[info.dtype])
    whole = dest if info.shape else dest.unsqueeze(0)
    read_into(store, name, dest.dtype, lambda part, row: whole[row : row + len(part)].copy_(part))
    return dest


def read_into(store: TensorStore, name: str, dtype: torch.dtype, put: Callable[[torch.Tensor, int], object]) -> None:
    """Hand one tensor to `put(rows, first row)`, a chunk of rows at a time; `dtype` is what it will be stored in.

    Raises CheckpointError when a float16 destination would hold a non-finite value, naming the tensor.
    """
    info = store.tensors[name]
    for start, stop in chunks(info.shape):
        part = store.rows(name, start, stop)
        if dtype == torch.float16:
            _check_float16(name, info, part)
        put(part, start)


def same(store: TensorStore, a: str, b: str) -> bool:
    """Whether two tensors are equal, compared in chunks and given up at the first difference."""
    x, y = store.tensors[a], store.tensors[b]
    if x.shape != y.shape:
        return False
    return all(bool((store.rows(a, i, j) == store.rows(b, i, j)).all()) for i, j in chunks(x.shape))


def check_shape(shape: tuple[int, ...], name: str, file: Path) -> int:
    """The number of elements, or an error when the dimensions are beyond what a file can hold."""
    if len(shape) > MAX_DIMS or math.prod(max(s, 1) for s in shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{file.name}: tensor {name!r} has an impossible shape {str(list(shape))[:100]}")
    return math.prod(shape)


def _check_float16(name: str, info: TensorInfo, part: torch.Tensor) -> None:
    top = float(part.abs().max()) if part.numel() else 0.0
    if not top <= 65504:  # also true for NaN
        raise CheckpointError(
            f"{name}: {info} holds {top:g}, which float16 cannot represent (largest is 65504); "
            "use a checkpoint or a chip with bfloat16 or float32"
        )
