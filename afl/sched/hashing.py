"""Names of cached blocks: a chain of hashes over everything that decides a block's content.

A block's name is the hash of its parent's name, its tokens, and what else the keys and values depend on: adapter and
its version, salt, weights version (in the root, so in every name) and the items (images, audio) that overlap the
block.  Equal names mean equal prefixes.  Names are 16 bytes of SHA-256: collisions are out of reach, also on purpose.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np


def root(adapter: str = "", adapter_version: int = 0, salt: str = "", weights: int = 0) -> bytes:
    """The name before the first block: one per domain in which prefixes may be shared.

    >>> root(adapter="x") != root(salt="x") != root(adapter="x", adapter_version=1)
    True
    """
    fields = [adapter.encode(), str(adapter_version).encode(), salt.encode(), str(weights).encode()]
    return _digest(b"afl-kv-1", *(len(f).to_bytes(4, "little") + f for f in fields))


def extend(
    chain: tuple[bytes, ...], start: Callable[[], bytes], tokens: np.ndarray, size: int,
    items: Sequence[tuple[int, int, str]] = (),
) -> tuple[bytes, ...]:
    """`chain` with the names of all full blocks of `size` tokens.

    start: gives the root.  items: (first token, tokens, content id) of multimodal inputs.

    >>> a = extend((), root, np.arange(10, dtype=np.int32), 4)
    >>> len(a), a == extend(a[:1], root, np.arange(11, dtype=np.int32), 4)
    (2, True)
    """
    n = len(tokens) // size
    if n <= len(chain):
        return chain
    names, parent = list(chain), chain[-1] if chain else start()
    raw, step = np.ascontiguousarray(tokens, np.int32).view(np.uint8).data, 4 * size
    for i in range(len(chain), n):
        digest = sha256(parent)
        digest.update(raw[i * step : (i + 1) * step])
        if items:
            for first, length, content in items:
                if first < (i + 1) * size and i * size < first + length:
                    digest.update(f"|{first - i * size}:{length}:{content}".encode())
        parent = digest.digest()[:16]
        names.append(parent)
    return tuple(names)


def key(name: bytes, group: int) -> bytes:
    """The name of a block in one cache group."""
    return name + group.to_bytes(1, "little") if group else name


def _digest(*parts: Any) -> bytes:
    return sha256(b"".join(parts)).digest()[:16]
