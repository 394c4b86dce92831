"""The event log: everything that happened to a scheduler, one JSON line per step.

Since the scheduler is a pure function of its events, the log replays to the same states.  Line 1 is a header with the
format version, config and policy; each further line is the list of events of one `step` call.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from afl.errors import BadInput
from afl.sched.events import Aborted, Arrived, Event, Request, Sampled, Tick
from afl.sched.policy import Policy
from afl.sched.state import SchedConfig, SchedState, init
from afl.sched.step import step

VERSION = 1


class EventLog:
    """Writes a log; a context manager."""

    def __init__(self, path: str | Path, config: SchedConfig, policy: Policy) -> None:
        self._file = open(path, "w", encoding="utf-8")
        header = {"afl_sched_log": VERSION, "config": attrs.asdict(config), "policy": json.loads(policy.to_json())}
        self._file.write(json.dumps(header) + "\n")

    def write(self, events: Iterable[Event]) -> None:
        """Record the events of one `step` call; write them before the call, so that a crash is replayable."""
        self._file.write(json.dumps([_encode(e) for e in events], separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def read(path: str | Path) -> tuple[SchedConfig, Policy, Iterator[list[Event]]]:
    """Config, policy and the events of each step.  Raises `BadInput` if the file is not a log of this version."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        header = json.loads(lines[0])
        version = header["afl_sched_log"]
    except (IndexError, ValueError, KeyError, TypeError):
        raise BadInput(f"{path} is not a scheduler event log: its first line is not a header") from None
    if version != VERSION:
        raise BadInput(f"{path} is a scheduler event log of version {version}, this afl reads version {VERSION}")
    policy = Policy.from_json(json.dumps(header["policy"]))
    return SchedConfig(**header["config"]), policy, ([_decode(e) for e in json.loads(line)] for line in lines[1:])


def replay(path: str | Path, policy: Policy | str | None = None, steps: int | None = None) -> SchedState:
    """The state after the log's steps, or after the first `steps` of them.

    With another `policy` the log only supplies requests: results belong to plans that this policy would not make, so
    that replay stops being exact at the first plan that differs and raises there.
    """
    from afl.sched.policies import get

    config, own, batches = read(path)
    policy = own if policy is None else get(policy) if isinstance(policy, str) else policy
    s = init(config, policy)
    for i, events in enumerate(batches):
        if i == steps:
            break
        s, _, _ = step(s, events, policy)
    return s


_DEFAULTS = {f.name: f.default for f in attrs.fields(Request) if f.default is not attrs.NOTHING}


def _encode(e: Event) -> list:
    match e:
        case Arrived(r):
            rest = {k: getattr(r, k) for k, v in _DEFAULTS.items() if getattr(r, k) != v}
            return ["arrived", r.id, r.prompt.tolist(), r.max_tokens, rest]
        case Sampled(n, tokens):
            return ["sampled", n, tokens.tolist()]
        case Aborted(id, reason):
            return ["aborted", id, reason]
        case Tick(now):
            return ["tick", now]


def _decode(e: list) -> Event:
    match e:
        case ["arrived", id, prompt, max_tokens, rest]:
            return Arrived(Request(id, prompt, max_tokens, **rest))
        case ["sampled", n, tokens]:
            return Sampled(n, tokens)
        case ["aborted", id, reason]:
            return Aborted(id, reason)
        case ["tick", now]:
            return Tick(now)
    raise BadInput(f"unknown event in the log: {e!r:.100}")
