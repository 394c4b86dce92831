"""Arrays from .npy and .npz files without trusting them: headers are read and sizes checked before memory is taken."""

import math
import zipfile
import zlib
from collections.abc import Container
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from afl.config import available_memory
from afl.errors import BalanceError

MOST_BYTES = 1 << 34
MOST_FILES = 10_000


def fit_in_memory(size: int) -> None:
    """Raise `BalanceError` if so many bytes are more than half of what this process can use, or absurd."""
    free = available_memory() // 2
    if size > min(free, MOST_BYTES):
        raise BalanceError(f"it would take {size:,} bytes of memory, at most {min(free, MOST_BYTES):,} are allowed; "
                           "cut the trace into shorter ones, or sum several windows into one")


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file."""
    with path.open("rb") as f:
        return _array(f, path.stat().st_size, path.name)


def read_npz(path: Path, names: Container[str]) -> dict[str, np.ndarray]:
    """The arrays of a .npz file that are called one of `names`."""
    try:
        with zipfile.ZipFile(path) as z:
            out = {}
            for n, entry in members(z).items():
                if n.endswith(".npy") and n.removesuffix(".npy") in names:
                    with z.open(entry) as f:
                        out[n.removesuffix(".npy")] = _array(f, entry.file_size, n)
            return out
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError) as e:
        raise BalanceError(f"it is not a .npz file: {e}") from None


def members(z: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Name -> entry of a zip archive with a sane number of them."""
    if len(z.infolist()) > MOST_FILES:
        raise BalanceError(f"{len(z.infolist())} files in one archive are too many")
    return {i.filename: i for i in z.infolist()}


def _array(f: IO[bytes], size: int, name: str) -> np.ndarray:
    try:
        version = npy.read_magic(f)
        read: Any = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"version {version}")
        shape, fortran, dtype = read(f)
    except (ValueError, SyntaxError, EOFError, OSError, RecursionError, MemoryError, TypeError) as e:
        raise BalanceError(f"{name} is not an array file: {str(e)[:200]}") from None
    return from_bytes(f, size, shape, dtype, fortran, name)


def from_bytes(f: IO[bytes], size: int, shape: tuple[int, ...], dtype: np.dtype, fortran: bool, name: str,
               ) -> np.ndarray:
    """The array whose bytes come next in `f`, a file of `size` bytes in all."""
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise BalanceError(f"{name} holds {dtype}; only whole and floating numbers are read, and nothing is unpickled")
    if len(shape) > 8 or any(n < 0 for n in shape):
        raise BalanceError(f"{name} has shape {list(shape)}")
    want = math.prod(shape) * dtype.itemsize
    if want > size:
        raise BalanceError(f"{name} is cut off: its header promises {want:,} bytes, {size:,} are there")
    fit_in_memory(3 * want)             # its bytes, as int64, and sums
    data = f.read(want)
    if len(data) < want:
        raise BalanceError(f"{name} is cut off: {want:,} bytes promised, {len(data):,} found")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
