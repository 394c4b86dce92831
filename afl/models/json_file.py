"""JSON from a checkpoint, which may be hostile: bytes, values and depth are bounded before anything is built."""

import json
from pathlib import Path
from typing import Any

from afl.errors import CheckpointError

MAX_BYTES = 64 << 20        # the largest index files in use are below 16 MiB
MAX_VALUES = 2_000_000      # bounds the Python objects that a small text of "[],[],..." can grow into


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_object(read_bytes(path), path.name)


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file of at most `max_bytes`."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path.name} has {size} bytes; at most {max_bytes} are read")
        with path.open("rb") as f:
            return f.read(max_bytes)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from None


def parse_object(raw: bytes, where: str, *, unique: bool = False) -> dict[str, Any]:
    """Parse `raw` as one JSON object.  `unique` refuses a key that occurs twice in an object."""
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise CheckpointError(f"{where} holds more than {MAX_VALUES} JSON values")
    try:
        found = json.loads(raw, object_pairs_hook=_unique if unique else None)
        if b"\\u" in raw:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed or looked up
    except (ValueError, RecursionError, MemoryError) as e:
        kind = "is nested too deeply" if isinstance(e, RecursionError) else f"is not valid JSON ({str(e)[:200]!r})"
        raise CheckpointError(f"{where} {kind}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} must be a JSON object, not {type(found).__name__}")
    return found


def is_count(x: Any) -> bool:
    """Whether x is a non-negative integer that fits 63 bits (JSON true is not)."""
    return type(x) is int and 0 <= x < 1 << 63


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
