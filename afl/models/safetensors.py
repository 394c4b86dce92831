"""Lazy reader of safetensors: one file, or shards named by an index.

A file is eight bytes of header length, a JSON header and the data.  Every length and offset is compared with the
file's size before it is used, so a hostile header costs no more than its own bytes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from afl.errors import CheckpointError, violations
from afl.models.json_file import is_count, parse_object, read_json
from afl.models.tensors import TensorInfo, check_shape

MAX_HEADER = 32 << 20
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}
_OTHER_SIZES = {"U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # checked, listed, not read


@attrs.frozen(eq=False)
class SafetensorsStore:
    """The tensors of a folder.  `where` gives the byte range of each inside its file's data."""

    tensors: Mapping[str, TensorInfo]
    where: Mapping[str, tuple[int, int]]
    notices: tuple[str, ...] = ()
    maps: dict[Path, np.ndarray] = attrs.field(factory=dict, repr=False)  # opened on first use

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        info, (begin, end) = self.tensors[name], self.where[name]
        n = info.shape[0] if info.shape else 1
        row = (end - begin) // n if n else 0
        raw = self._map(info.file)[begin + start * row : begin + stop * row]
        if raw.ctypes.data % _TORCH[info.dtype].itemsize:
            raw = raw.copy()
        shape = (stop - start, *info.shape[1:])
        return torch.from_numpy(raw).view(_TORCH[info.dtype]).reshape(shape)

    def _map(self, file: Path) -> np.ndarray:
        if file not in self.maps:
            # copy-on-write, because torch warns about arrays that cannot be written; nobody writes
            self.maps[file] = np.memmap(file, np.uint8, mode="c") if file.stat().st_size else np.empty(0, np.uint8)
        return self.maps[file]


def open_folder(folder: Path) -> SafetensorsStore:
    """The store of a folder: `model.safetensors.index.json`, else `model.safetensors`, else the only such file."""
    if (folder / INDEX).exists():
        return _open_index(folder)
    files = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(f.name for f in files[:8])
        raise CheckpointError(f"{folder} has {len(files)} safetensors files ({names}) and no {INDEX}")
    return _store(files)


def read_header(file: Path) -> dict[str, tuple[TensorInfo, tuple[int, int]]]:
    """Tensor name -> (info, byte range in the file), after every number has been checked against the file's size."""
    try:
        with file.open("rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(f"{file.name} is truncated: {size} bytes, its header says {length} of header")
            if length > MAX_HEADER:
                raise CheckpointError(f"{file.name}: a header of {length} bytes; at most {MAX_HEADER} are read")
            raw = f.read(length)
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror or e}") from None
    entries = parse_object(raw, f"the header of {file.name}", unique=True)
    entries.pop("__metadata__", None)
    base = 8 + length
    found = {name: _entry(name, e, file, base, size - base) for name, e in entries.items()}
    _check_cover(found, file, base, size)
    return found


def _entry(name: str, e: Any, file: Path, base: int, data: int) -> tuple[TensorInfo, tuple[int, int]]:
    where = f"{file.name}: tensor {name[:200]!r}"
    if not isinstance(e, dict):
        raise CheckpointError(f"{where} is described by {type(e).__name__}, not by an object")
    stored, shape, span = e.get("dtype"), e.get("shape"), e.get("data_offsets")
    if not isinstance(stored, str) or (stored not in _TYPES and stored not in _OTHER_SIZES):
        raise CheckpointError(f"{where} has dtype {str(stored)[:40]!r}; known: {', '.join(_TYPES)}")
    if not isinstance(shape, list) or not all(is_count(s) for s in shape):
        raise CheckpointError(f"{where} has shape {str(shape)[:100]}; expected a list of sizes")
    if not isinstance(span, list) or len(span) != 2 or not all(is_count(s) for s in span):
        raise CheckpointError(f"{where} has data_offsets {str(span)[:100]}; expected [begin, end]")
    begin, end = span
    elements = check_shape(tuple(shape), name[:200], file)
    itemsize = _TORCH[_TYPES[stored]].itemsize if stored in _TYPES else _OTHER_SIZES[stored]
    if not begin <= end <= data:
        raise CheckpointError(f"{where} lies at bytes {begin}..{end}, but the file holds {data}: truncated or corrupt")
    if end - begin != elements * itemsize:
        raise CheckpointError(f"{where} is {stored}{shape} but takes {end - begin} bytes, not {elements * itemsize}")
    info = TensorInfo(tuple(shape), _TYPES.get(stored, stored), stored, file)
    return info, (base + begin, base + end)


def _check_cover(found: Mapping[str, tuple[TensorInfo, tuple[int, int]]], file: Path, base: int, size: int) -> None:
    """The format allows neither overlaps nor holes."""
    at = base
    for begin, end, name in sorted((b, e, n) for n, (_, (b, e)) in found.items()):
        if begin != at:
            word = "overlaps the one before it" if begin < at else "leaves a hole before it"
            raise CheckpointError(f"{file.name}: tensor {name[:200]!r} {word} (byte {begin - base}, not {at - base})")
        at = end
    if at != size:
        raise CheckpointError(f"{file.name}: {size - at} bytes at the end belong to no tensor")


def _store(files: Iterable[Path]) -> SafetensorsStore:
    tensors: dict[str, TensorInfo] = {}
    where: dict[str, tuple[int, int]] = {}
    for file in files:
        for name, (info, span) in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is both in {tensors[name].file.name} and in {file.name}")
            tensors[name], where[name] = info, span
    return SafetensorsStore(tensors, where)


def _open_index(folder: Path) -> SafetensorsStore:
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise CheckpointError(f"{INDEX}: weight_map must map tensor names to file names")
    shards = sorted(set(listed.values()))
    for shard in shards:
        if not _is_plain(shard):
            raise CheckpointError(f"{INDEX} names the shard {shard[:200]!r}; a shard is a file name inside the folder")
    wrong = []
    for shard in shards:
        if not (folder / shard).is_file():
            names = sorted(n for n, s in listed.items() if s == shard)
            wrong.append(f"shard {shard} is missing; it should hold {len(names)} tensors: {_few(names)}")
    if wrong:
        raise CheckpointError(violations(f"{folder} is incomplete", wrong))
    store = _store(folder / s for s in shards)
    for shard in shards:
        gone = sorted(
            n for n, s in listed.items() if s == shard and (n not in store.tensors or store.tensors[n].file.name != s)
        )
        if gone:
            wrong.append(f"shard {shard} lacks {len(gone)} tensors that {INDEX} promises: {_few(gone)}")
    if wrong:
        raise CheckpointError(violations(f"{folder} is incomplete", wrong))
    extra = sorted(set(store.tensors) - set(listed))
    notices = (f"{len(extra)} tensors are in the shards but not in {INDEX}: {_few(extra)}",) if extra else ()
    return attrs.evolve(store, notices=notices)


def _is_plain(name: str) -> bool:
    return name.isprintable() and 0 < len(name) < 256 and name not in (".", "..") and not set(name) & set("/\\:")


def _few(names: list[str]) -> str:
    return ", ".join(n[:200] for n in names[:5]) + (f", ... ({len(names) - 5} more)" if len(names) > 5 else "")


_TORCH = {name: getattr(torch, name) for name in _TYPES.values()}
