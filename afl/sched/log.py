"""The event log: everything that happened to a scheduler, one JSON line per step.

Since the scheduler is a pure function of its events, the log replays to the same states.  Line 1 is a header with the
format version, config and policy; each further line is the list of events of one `step` call.  docs/scheduler.md
describes the format.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from afl.errors import BadInput
from afl.sched.config import SchedConfig
from afl.sched.events import KINDS, Arrived, Event, Request
from afl.sched.policy import Policy
from afl.sched.state import SchedState, init
from afl.sched.step import step

VERSION = 2
_KINDS = {k.__name__.lower(): k for k in KINDS}


class EventLog:
    """Writes a log; a context manager."""

    def __init__(self, path: str | Path, config: SchedConfig, policy: Policy) -> None:
        self._file = open(path, "w", encoding="utf-8", buffering=1)     # a line is on its way when its step begins
        header = {"afl_sched_log": VERSION, "config": config.record(), "policy": json.loads(policy.to_json())}
        self._file.write(json.dumps(header) + "\n")

    def write(self, events: Iterable[Event]) -> None:
        """Record the events of one `step` call; write them before the call, so that a crash is replayable."""
        self._file.write(json.dumps([encode(e) for e in events], separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def read(path: str | Path) -> tuple[SchedConfig, Policy, Iterator[list[Event]]]:
    """Config, policy and the events of each step.  Raises `BadInput` if the file is not a log of this version."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        header = json.loads(lines[0])
        version = header["afl_sched_log"]
    except (IndexError, ValueError, KeyError, TypeError):
        raise BadInput(f"{path} is not a scheduler event log: its first line is not a header") from None
    if version != VERSION:
        raise BadInput(f"{path} is a scheduler event log of version {version}, this afl reads version {VERSION}")
    try:
        policy, config = Policy.from_json(json.dumps(header["policy"])), SchedConfig.of(header["config"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise BadInput(f"{path}: the header has no valid config and policy: {e}") from None
    return config, policy, _batches(path, lines[1:])


def _batches(path: str | Path, lines: list[str]) -> Iterator[list[Event]]:
    for n, line in enumerate(lines, 2):
        try:
            yield [decode(e) for e in json.loads(line)]
        except (ValueError, TypeError, KeyError, IndexError) as e:
            if n == len(lines) + 1 and isinstance(e, ValueError):
                return                             # a crash cut the last line short
            raise BadInput(f"{path}, line {n}: {e}; the line is not a list of events") from None


def replay(path: str | Path, policy: Policy | str | None = None, steps: int | None = None) -> SchedState:
    """The state after the log's steps, or after the first `steps` of them.

    With another `policy` the log only supplies requests: results belong to plans that this policy would not make, so
    that replay stops being exact at the first plan that differs and raises there; `afl.sched.whatif` goes on.
    """
    config, own, batches = read(path)
    policy = own if policy is None else Policy.read(policy) if isinstance(policy, str) else policy
    s = init(config, policy)
    for i, events in enumerate(batches):
        if i == steps:
            break
        s, _, _ = step(s, events, policy)
    return s


def encode(e: Event) -> list:
    """An event as JSON values: its name, then its fields up to the last one that is not the default."""
    kind = type(e)
    values = [_plain(getattr(e, f.name)) for f in attrs.fields(kind)]
    for f in reversed(attrs.fields(kind)):
        if f.default is attrs.NOTHING or values[-1] != f.default:
            break
        values.pop()
    return [kind.__name__.lower(), *values]


def decode(record: list) -> Event:
    """The event of a record."""
    kind = _KINDS.get(record[0])
    if kind is None:
        raise ValueError(f"unknown event {record[0]!r:.60}")
    values: Any = [Request(**record[1])] if kind is Arrived else record[1:]
    return kind(*values)


_DEFAULTS = {f.name: f.default for f in attrs.fields(Request) if f.default is not attrs.NOTHING}


def _plain(value: Any) -> Any:
    if isinstance(value, Request):
        fields = {f.name: getattr(value, f.name) for f in attrs.fields(Request)}
        return {k: _plain(v) for k, v in fields.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
    return value.tolist() if isinstance(value, np.ndarray) else value
