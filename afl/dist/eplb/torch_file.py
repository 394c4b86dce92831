"""Tensors from files of torch.save, without torch and without unpickling.

Such a file is a zip archive: `data.pkl` says how to rebuild the tensors, `data/0`, ... are their bytes.  The pickle is
walked as a list of instructions of which only those that build plain data are known; a call is understood if it is the
one that rebuilds a tensor, and nothing is ever called.
"""

import pickletools
import zipfile
import zlib
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from afl.dist.eplb.arrays import fit_in_memory, from_bytes, members
from afl.errors import BalanceError

_STORAGES = {"FloatStorage": "f4", "DoubleStorage": "f8", "HalfStorage": "f2", "LongStorage": "i8", "IntStorage": "i4",
             "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1"}
_PUSH = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_REBUILD = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor")
_MARK, _NOT_UNDERSTOOD = object(), object()


class _Name(NamedTuple):
    text: str


class _Storage(NamedTuple):
    dtype: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def read_torch(path: Path, names: Container[str]) -> np.ndarray | dict[str, np.ndarray]:
    """The tensor of a file, or the tensors called one of `names` if it holds a dict.  Raises `BalanceError`."""
    try:
        with zipfile.ZipFile(path) as z:
            found = members(z)
            index = next((n for n in found if n.endswith("data.pkl")), None)
            if index is None:
                raise BalanceError("there is no data.pkl in it")
            size = found[index].file_size
            if size > 1 << 22:
                raise BalanceError(f"its index has {size:,} bytes, too many for a file of a few tensors")
            root = _walk(z.read(index))
            top = index.removesuffix("data.pkl")

            def load(t: _Tensor) -> np.ndarray:
                entry = found.get(f"{top}data/{t.storage.key}")
                if entry is None:
                    raise BalanceError(f"the bytes of storage {t.storage.key} are missing")
                dtype = np.dtype(t.storage.dtype)
                with z.open(entry) as f:
                    n = entry.file_size // dtype.itemsize
                    return _view(from_bytes(f, entry.file_size, (n,), dtype, False, entry.filename), t)

            if isinstance(root, _Tensor):
                return load(root)
            if isinstance(root, dict):
                return {k: load(v) for k, v in root.items() if isinstance(v, _Tensor) and k in names}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError) as e:
        raise BalanceError(f"it is not a file of torch.save: {e}; save it as .npy") from None
    raise BalanceError("it holds neither a tensor nor a dict of tensors")


def _view(flat: np.ndarray, t: _Tensor) -> np.ndarray:
    """The tensor's elements of its storage; every index is checked."""
    if len(t.shape) != len(t.stride) or len(t.shape) > 8 or min((*t.shape, *t.stride, t.offset), default=0) < 0:
        raise BalanceError(f"a tensor of shape {t.shape}, strides {t.stride}, offset {t.offset}")
    last = t.offset + sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True))
    if 0 in t.shape:
        return np.zeros(t.shape, flat.dtype)
    if last >= len(flat):
        raise BalanceError(f"a tensor reaches to element {last} of {len(flat)}")
    fit_in_memory(3 * int(np.prod(t.shape, dtype=object)) * 8)
    strides = tuple(s * flat.itemsize for s in t.stride)
    return np.lib.stride_tricks.as_strided(flat[t.offset:], t.shape, strides, writeable=False).copy()


def _walk(data: bytes) -> Any:
    """The value that a pickle describes; tensors as `_Tensor`."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for op, arg, _ in pickletools.genops(data):
            name = op.name
            if name in _PUSH:
                stack.append(arg)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "STOP":
                return stack[-1]
            elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[int(arg)] = stack[-1]              # type: ignore[arg-type]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo[int(arg)])            # type: ignore[arg-type]
            elif name in _BUILD:
                _BUILD[name](stack, arg)
            elif name not in ("PROTO", "FRAME"):
                raise BalanceError(f"its index uses the pickle instruction {name}, which no plain tensor needs; it is "
                                   "not executed; save the counts as .npy")
    except BalanceError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise BalanceError(f"its index cannot be read: {type(e).__name__}: {e}; save the counts as .npy") from None
    raise BalanceError("its index has no end")


def _to_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1 - next(i for i, x in enumerate(reversed(stack)) if x is _MARK)
    items = stack[at + 1:]
    del stack[at:]
    return items


def _call(stack: list[Any], _: Any) -> None:
    args, what = stack.pop(), stack.pop()
    if what in [_Name(n) for n in _REBUILD]:
        storage, offset, shape, stride = args[:4]
        if not isinstance(storage, _Storage) or not all(type(n) is int for n in (offset, *shape, *stride)):
            raise ValueError("a tensor without storage")
        stack.append(_Tensor(storage, offset, tuple(shape), tuple(stride)))
    else:
        stack.append({} if what == _Name("collections OrderedDict") else _NOT_UNDERSTOOD)


def _stored(stack: list[Any], _: Any) -> None:
    kind, storage, key, *_rest = stack.pop()
    if kind != "storage" or not isinstance(storage, _Name) or not isinstance(key, str):
        raise ValueError("a reference to something else than a storage")
    dtype = _STORAGES.get(storage.text.split()[-1])
    if dtype is None:
        raise ValueError(f"numbers of {storage.text.split()[-1]}")
    stack.append(_Storage("<" + dtype, key))


def _items(stack: list[Any], _: Any) -> None:
    flat = _to_mark(stack)
    stack[-1].update(zip(map(_key, flat[::2]), flat[1::2], strict=True))


def _item(stack: list[Any], _: Any) -> None:
    value, key = stack.pop(), stack.pop()
    stack[-1][_key(key)] = value


def _key(x: Any) -> Any:
    if type(x) not in (str, int):       # hashing a tuple of tuples of ... could take for ever
        raise ValueError("a key that is neither text nor a number")
    return x


def _tuple_of(n: int) -> Any:
    def build(stack: list[Any], _: Any) -> None:
        items = tuple(stack[len(stack) - n:])
        if len(items) < n:
            raise IndexError("too few values")
        del stack[len(stack) - n:]
        stack.append(items)

    return build


def _appends(stack: list[Any], _: Any) -> None:
    items = _to_mark(stack)
    stack[-1].extend(items)


def _append(stack: list[Any], _: Any) -> None:
    item = stack.pop()
    stack[-1].append(item)


def _named(stack: list[Any], _: Any) -> None:
    name, module = stack.pop(), stack.pop()
    stack.append(_Name(f"{module} {name}"))


_BUILD: dict[str, Any] = {
    "GLOBAL": lambda s, arg: s.append(_Name(arg)),
    "STACK_GLOBAL": _named,
    "EMPTY_DICT": lambda s, _: s.append({}),
    "EMPTY_LIST": lambda s, _: s.append([]),
    "EMPTY_TUPLE": lambda s, _: s.append(()),
    "TUPLE": lambda s, _: s.append(tuple(_to_mark(s))),
    "TUPLE1": _tuple_of(1), "TUPLE2": _tuple_of(2), "TUPLE3": _tuple_of(3),
    "APPEND": _append, "APPENDS": _appends, "SETITEM": _item, "SETITEMS": _items,
    "BINPERSID": _stored, "REDUCE": _call,
    "BUILD": lambda s, _: s.pop(), "POP": lambda s, _: s.pop(),
}
