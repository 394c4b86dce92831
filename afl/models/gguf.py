"""The GGUF format: metadata and tensors of one file, with every count checked against the file's size.

The reader of package `gguf` allocates what the header asks for, so the header is parsed here; the package gives the
block formats (`GGML_QUANT_SIZES`) and their dequantisation.  What the names mean is in `gguf_model`.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs
import numpy as np
import torch

from afl.errors import CheckpointError
from afl.models.tensors import TensorInfo, check_shape

MAX_ENTRIES = 1 << 16       # metadata keys, and tensors
MAX_STRING = 16 << 20
MAX_STRINGS = 4 << 20       # strings in all arrays together: bounds the Python objects made from small bytes
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_READABLE = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)


@attrs.frozen
class Blob:
    """One tensor as the file has it: dimensions slowest first, block format, absolute offset, bytes per row."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    row_bytes: int


@attrs.frozen(eq=False)
class GgufFile:
    """A parsed file: metadata values (numbers, str, list[str], numpy arrays) and where each tensor lies."""

    path: Path
    meta: Mapping[str, Any]
    blobs: Mapping[str, Blob]
    data: np.ndarray = attrs.field(repr=False)      # the whole file, mapped

    def raw(self, name: str, index: "slice | np.ndarray") -> np.ndarray:
        """The chosen rows along the first dimension as bytes [rows, row_bytes]."""
        blob = self.blobs[name]
        return self.data[blob.offset : blob.offset + blob.row_bytes * blob.shape[0]].reshape(blob.shape[0], -1)[index]

    def rows(self, name: str, index: "slice | np.ndarray") -> torch.Tensor:
        """The chosen rows along the first dimension, dequantised to float32 (F16 and BF16 stay as they are)."""
        blob, raw = self.blobs[name], self.raw(name, index)
        return dequantise(raw, blob.kind).reshape(raw.shape[0], *blob.shape[1:])


def dtype_of(kind: str) -> str:
    """The dtype that `rows` returns for a block format."""
    return {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")


def dequantise(raw: np.ndarray, kind: str) -> torch.Tensor:
    """Bytes [rows, row_bytes] of a block format as a flat tensor.  F32, F16 and BF16 may view `raw`."""
    if kind in ("F32", "F16", "BF16"):
        dtype = getattr(torch, dtype_of(kind))
        flat = np.ascontiguousarray(raw).reshape(-1)
        return torch.from_numpy(flat.copy() if flat.ctypes.data % dtype.itemsize else flat).view(dtype)
    from gguf import GGMLQuantizationType, quants

    # one long row: the package works on groups of 16 rows, which is slow when rows are short
    return torch.from_numpy(quants.dequantize(raw.reshape(1, -1), GGMLQuantizationType[kind])).reshape(-1)


def read_file(path: Path) -> GgufFile:
    """Parse and check the header.  Raises CheckpointError on anything that does not fit the file."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        if path.stat().st_size < 24:
            raise CheckpointError(f"{path.name} is truncated: {path.stat().st_size} bytes")
        # copy-on-write, because torch warns about arrays that cannot be written; nobody writes
        data = np.memmap(path, np.uint8, mode="c")
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from None
    cursor = _Cursor(path, data.data)
    tensors, keys = _check_start(cursor)
    meta = {}
    for _ in range(keys):
        key = cursor.string(1 << 16)
        if key in meta:
            cursor.fail(f"metadata key {key!r} occurs twice")
        meta[key] = cursor.value(key)
    blobs = _blobs(cursor, tensors, meta.get("general.alignment", 32))
    return GgufFile(path, meta, blobs, data)


def _check_start(cursor: "_Cursor") -> tuple[int, int]:
    magic, version = bytes(cursor.take(4)), cursor.number("I")
    if magic != b"GGUF":
        cursor.fail(f"is not a GGUF file: it starts with {magic!r}")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        cursor.fail("is big-endian; only little-endian files are read" if swapped else f"has version {version}, not 3")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    if tensors > MAX_ENTRIES or keys > MAX_ENTRIES:
        cursor.fail(f"claims {tensors} tensors and {keys} metadata keys; at most {MAX_ENTRIES} are read")
    return tensors, keys


def _blobs(cursor: "_Cursor", count: int, alignment: Any) -> dict[str, Blob]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {str(alignment)[:40]}, not a power of two")
    kinds = {int(k): (k.name, *GGML_QUANT_SIZES[k]) for k in GGMLQuantizationType if k.name in _READABLE}
    found: dict[str, tuple[tuple[int, ...], str, int, int, int]] = {}
    for _ in range(count):
        name, dims = cursor.string(1 << 12), cursor.number("I")
        if dims > 8:
            cursor.fail(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1] or (1,)
        code, offset = cursor.number("I"), cursor.number("Q")
        if code not in kinds:
            known = {int(k): k.name for k in GGMLQuantizationType}
            cursor.fail(f"tensor {name!r} is stored as {known.get(code, code)}; readable are {', '.join(_READABLE)}")
        kind, per_block, block_bytes = kinds[code]
        if check_shape(shape, name, cursor.path) == 0 or shape[-1] % per_block:
            cursor.fail(f"tensor {name!r} of shape {list(shape)} is not made of whole {kind} blocks of {per_block}")
        if name in found or offset % alignment:
            cursor.fail(f"tensor {name!r} occurs twice" if name in found else f"tensor {name!r} is not aligned")
        found[name] = (shape, kind, offset, per_block, block_bytes)
    base = -(-cursor.at // alignment) * alignment
    return _check_ranges(cursor, base, found)


def _check_ranges(cursor: "_Cursor", base: int, found: Mapping[str, Any]) -> dict[str, Blob]:
    blobs, spans = {}, []
    for name, (shape, kind, offset, per_block, block_bytes) in found.items():
        row_bytes = math.prod(shape[1:]) // per_block * block_bytes if len(shape) > 1 else block_bytes
        if len(shape) == 1 and per_block > 1:
            cursor.fail(f"tensor {name!r} is a quantised vector, which is not supported")
        blobs[name] = Blob(shape, kind, base + offset, row_bytes)
        spans.append((base + offset, base + offset + row_bytes * shape[0], name))
    spans.sort()
    for (_, end, _), (begin, _, name) in zip(spans, spans[1:], strict=False):
        if begin < end:
            cursor.fail(f"tensor {name!r} overlaps the one before it")
    if spans and spans[-1][1] > len(cursor.view):
        cursor.fail(f"is truncated: tensor {spans[-1][2]!r} ends at byte {spans[-1][1]} of {len(cursor.view)}")
    return blobs


class _Cursor:
    """Reads values one after the other; every length is compared with what is left of the file."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path, self.view, self.at, self.strings = path, view, 0, 0

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path.name}: {what[:600]}")

    def take(self, n: int) -> memoryview:
        if n > len(self.view) - self.at:
            self.fail(f"is truncated or corrupt: {n} bytes wanted at byte {self.at} of {len(self.view)}")
        self.at += n
        return self.view[self.at - n : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self, most: int = MAX_STRING) -> str:
        n = self.number("Q")
        if n > most:
            self.fail(f"a string of {n} bytes at byte {self.at}; at most {most} are read")
        try:
            return str(self.take(n), "utf-8")
        except UnicodeDecodeError:
            self.fail(f"a string at byte {self.at - n} is not UTF-8")

    def value(self, key: str) -> Any:
        kind = self.number("I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            self.fail(f"metadata key {key!r} has the unknown type {kind}")
        kind, n = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind])
            return np.frombuffer(self.take(n * dtype.itemsize), dtype).copy()
        if kind != _STRING:
            self.fail(f"metadata key {key!r} is an array of the type {kind}, which is not read")
        self.strings += n
        if self.strings > MAX_STRINGS or n > (len(self.view) - self.at) // 8:
            self.fail(f"metadata key {key!r} claims {n} strings")
        return [self.string() for _ in range(n)]


@attrs.frozen(eq=False)
class GgufStore:
    """The tensors of a GGUF file under Hugging Face names.

    `names` maps them to the file's names; `order` gives, for tensors stored with permuted rows, the file's row of
    each logical row.
    """

    file: GgufFile
    names: Mapping[str, str]
    order: Mapping[str, np.ndarray]
    tensors: Mapping[str, TensorInfo]

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        index = self.order[name][start:stop] if name in self.order else slice(start, stop)
        return self.file.rows(self.names[name], index)

    def raw_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) as the file's bytes, uint8 [rows, row bytes]; a copy."""
        index = self.order[name][start:stop] if name in self.order else slice(start, stop)
        return torch.from_numpy(self.file.raw(self.names[name], index).copy())
