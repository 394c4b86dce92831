"""Containers with cheap versions: an update returns a new version and every old version stays valid.

The newest version holds the plain data; an older one holds only how it differs from its successor and is
re-rooted when somebody reads it.  Following the newest version therefore costs what a mutable container costs,
while keeping an old one costs memory per update made since.  Versions of one container belong to one thread.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from afl.machine_code import kept

_GONE: Any = object()


class VDict(Mapping):
    """A dict whose `set` and `delete` return new versions.  Iteration order is not part of the value.

    >>> a = VDict().set("x", 1)
    >>> b = a.set("x", 2).delete("y")
    >>> a["x"], b["x"], len(a.delete("x"))
    (1, 2, 0)
    """

    __slots__ = ("_dict", "_undo", "_newer", "_size")

    def __init__(self, items: Any = ()) -> None:
        self._dict: Any = dict(items)
        self._undo: Any = None                         # {key: value here or _GONE} when not the root
        self._newer: Any = None                        # the version made from this one
        self._size = len(self._dict)

    def set(self, key: Any, value: Any) -> "VDict":
        """The version with `key` bound to `value`."""
        return self._step(key, value)

    def delete(self, key: Any) -> "VDict":
        """The version without `key`; an absent key is fine."""
        return self._step(key, _GONE)

    def update(self, changes: Mapping) -> "VDict":
        """The version with all of `changes` bound, for the price of one.

        >>> VDict({"x": 1}).update({"x": 2, "y": 3}).get("y")
        3
        """
        d = self._root()
        undo = {key: d.get(key, _GONE) for key in changes}
        d.update(changes)
        return self._moved(d, undo)

    def get(self, key: Any, default: Any = None) -> Any:
        return self._root().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        return self._root()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._root()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._root()))

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"VDict({self._size} items)"

    def __reduce__(self) -> tuple:
        return VDict, (dict(self._root()),)

    def _step(self, key: Any, value: Any) -> "VDict":
        d = self._root()
        old = d.get(key, _GONE)
        if value is old:
            return self
        _put(d, key, value)
        return self._moved(d, {key: old})

    def _moved(self, d: dict, undo: dict) -> "VDict":
        new = VDict.__new__(VDict)
        new._dict, new._undo, new._newer, new._size = d, None, None, len(d)
        self._dict, self._undo, self._newer = None, undo, new
        return new

    def _root(self) -> dict:
        """Make this version the one that holds the data."""
        if self._dict is not None:
            return self._dict
        chain: list[VDict] = []
        v = self
        while v._dict is None:
            chain.append(v)
            v = v._newer
        for u in reversed(chain):
            d = v._dict
            v._undo = {key: d.get(key, _GONE) for key in u._undo}
            for key, value in u._undo.items():
                _put(d, key, value)
            v._dict, v._newer = None, u
            u._dict, u._undo, u._newer = d, None, None
            v = u
        return v._dict


def _put(d: dict, key: Any, value: Any) -> None:
    if value is _GONE:
        d.pop(key, None)
    else:
        d[key] = value


class VArray:
    """A numpy array whose `set` returns a new version.

    >>> a = VArray(np.zeros(3, int))
    >>> b = a.set([0, 2], [5, 6])
    >>> b.array.tolist(), a.array.tolist()
    ([5, 0, 6], [0, 0, 0])
    """

    __slots__ = ("_data", "_view", "_undo", "_newer")

    def __init__(self, data: np.ndarray) -> None:
        self._data = np.array(data)
        self._view = self._data.view()
        self._view.flags.writeable = False
        self._undo: Any = None                         # (index, values here) when not the root
        self._newer: Any = None

    @property
    def array(self) -> np.ndarray:
        """Read-only view of this version.  It shows other versions once one of them is read or made: copy to keep."""
        if self._data is None:
            self._root()
        return self._view

    def set(self, index: Any, values: Any) -> "VArray":
        """The version with `array[index] = values`; `index` names no element twice."""
        data = self._root()
        new = VArray.__new__(VArray)
        new._data, new._view, new._undo, new._newer = data, self._view, None, None
        self._undo = (index, np.array(data[index]))
        self._data, self._newer = None, new
        data[index] = values
        return new

    def edit(self, loop: Callable, most: int, *args: Any) -> tuple["VArray", Any]:
        """The version made by a loop that writes places itself, and the loop's second result.

        loop(data, at, old, *args) writes into the 1-d `data` and notes each write in `at` (the place) and `old` (what
        was there), at most `most` of them, a place written twice noted twice; it returns (writes, result).
        """
        data = self._root()
        at, old = np.empty(most, np.intp), np.empty(most, data.dtype)
        n, result = loop(data, at, old, *args)
        new = VArray.__new__(VArray)
        new._data, new._view, new._undo, new._newer = data, self._view, None, None
        self._undo = (at[:n][::-1], old[:n][::-1])     # of several values for one place the last one stays: the oldest
        self._data, self._newer = None, new
        return new, result

    def __reduce__(self) -> tuple:
        return VArray, (self.array.copy(),)

    def _root(self) -> np.ndarray:
        """Make this version the one that holds the data."""
        if self._data is not None:
            return self._data
        chain: list[VArray] = []
        v, data = self, np.empty(0)
        while v._data is None:
            chain.append(v)
            v = v._newer
        for u in reversed(chain):
            data: Any = v._data
            index, values = u._undo
            v._undo = (index, np.array(data[index]))
            data[index] = values
            v._data, v._newer = None, u
            u._data, u._undo, u._newer = data, None, None
            v = u
        return data


class TokenLog:
    """Rows of int32 tokens that grow at their ends, in one buffer that all versions share.

    A version is the place where each row starts and ends.  Appending writes behind the end of every other version;
    when somebody else has already written there (a fork), the appending version moves to a buffer of its own.

    >>> a = TokenLog(2).put(0, [1, 2])
    >>> b, c = a.append([0], [3]), a.append([0], [4])
    >>> a[0].tolist(), b[0].tolist(), c[0].tolist()
    ([1, 2], [1, 2, 3], [1, 2, 4])
    """

    __slots__ = ("lengths", "_start", "_end", "_stop", "_shared")

    lengths: np.ndarray        # int32 [rows], read-only
    _start: np.ndarray         # int64 [rows] place in the buffer of the first token
    _end: np.ndarray           # int64 [rows] place behind the last token
    _stop: np.ndarray          # int64 [rows] place behind the row's segment
    _shared: "_Shared"

    def __init__(self, rows: int) -> None:
        zero = np.zeros(rows, np.int64)
        self._fill(zero, zero, zero, _Shared(np.empty(64, np.int32), np.full(rows, -1, np.int64), 0))

    def put(self, row: int, tokens: Any) -> "TokenLog":
        """The version in which `row` holds exactly `tokens`."""
        tokens = np.asarray(tokens, np.int32)
        room = _room(len(tokens))
        log = self if self._shared.top + room <= len(self._shared.buffer) else self._moved(room)
        s = log._shared
        start, end = s.top, s.top + len(tokens)
        s.buffer[start:end] = tokens
        s.top += room
        s.high[row] = end
        return log._with(row, start, end, start + room)

    def clear(self, rows: Any) -> "TokenLog":
        """The version in which `rows` are empty."""
        return self._with(rows, 0, 0, 0)

    def append(self, rows: Any, tokens: Any) -> "TokenLog":
        """The version with one more token on each of `rows` (no row twice).  About 10 us for 256 rows."""
        rows, tokens = np.asarray(rows, np.intp), np.asarray(tokens, np.int32)
        log, write = self, _append_loop()
        ends = self._end.copy()
        if not write(rows, tokens, ends, self._stop, self._shared.high, self._shared.buffer):
            log = self._moved(0, rows)
            ends = log._end.copy()
            write(rows, tokens, ends, log._stop, log._shared.high, log._shared.buffer)
        return TokenLog.__new__(TokenLog)._fill(log._start, ends, log._stop, log._shared)

    def at(self, rows: Any, positions: Any) -> np.ndarray:
        """Token of each (row, position); every position lies inside its row."""
        return self._shared.buffer[self._start[rows] + positions]

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(buffer, place of each row's first token in it, lengths) for compiled loops; read only."""
        return self._shared.buffer, self._start, self.lengths

    def __getitem__(self, row: Any) -> np.ndarray:
        view = self._shared.buffer[self._start[row] : self._end[row]]
        view.flags.writeable = False
        return view

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"TokenLog({len(self)} rows, {int(self.lengths.sum())} tokens)"

    def _fill(self, start: np.ndarray, end: np.ndarray, stop: np.ndarray, shared: "_Shared") -> "TokenLog":
        self._start, self._end, self._stop, self._shared = start, end, stop, shared
        self.lengths = (end - start).astype(np.int32)
        self.lengths.flags.writeable = False
        return self

    def _with(self, row: Any, start: int, end: int, stop: int) -> "TokenLog":
        starts, ends, stops = self._start.copy(), self._end.copy(), self._stop.copy()
        starts[row], ends[row], stops[row] = start, end, stop
        return TokenLog.__new__(TokenLog)._fill(starts, ends, stops, self._shared)

    def _moved(self, extra: int, used: Any = ()) -> "TokenLog":
        """The same rows in a fresh buffer, those with tokens or in `used` with room to grow; `extra` places more."""
        keep = self.lengths > 0
        keep[np.asarray(used, np.intp)] = True
        rows = np.flatnonzero(keep)
        room = _room(self.lengths[rows].astype(np.int64))
        places = np.cumsum(room) - room
        top = int(room.sum())
        buffer = np.empty(2 * (top + extra) + 64, np.int32)
        start, end, stop = np.zeros((3, len(self)), np.int64)
        start[rows], end[rows], stop[rows] = places, places + self.lengths[rows], places + room
        for row in rows:
            buffer[start[row] : end[row]] = self[row]
        high = np.full(len(self), -1, np.int64)
        high[rows] = end[rows]
        return TokenLog.__new__(TokenLog)._fill(start, end, stop, _Shared(buffer, high, top))


class _Shared:
    """What the versions of a token log have in common."""

    __slots__ = ("buffer", "high", "top")

    def __init__(self, buffer: np.ndarray, high: np.ndarray, top: int) -> None:
        self.buffer = buffer     # int32
        self.high = high         # int64 [rows] place behind the last token anybody wrote in the row's newest segment
        self.top = top           # place behind the last segment


def _append(rows, tokens, ends, stop, high, buffer):
    """Write the tokens and move `ends` and `high`; False, and nothing done, if a row is full or was forked."""
    for row in rows:
        if ends[row] >= stop[row] or ends[row] != high[row]:
            return False
    for i in range(len(rows)):
        row = rows[i]
        buffer[ends[row]] = tokens[i]
        ends[row] += 1
        high[row] = ends[row]
    return True


@cache
def _append_loop() -> Any:
    """`_append` compiled: 4 us instead of 40 us for 256 rows."""
    import numba

    return kept(numba.njit)(_append)


def _room(length: Any) -> Any:
    """Size of the segment for a row of `length` tokens: half as much again, so that moves are rare."""
    return length + length // 2 + 16
