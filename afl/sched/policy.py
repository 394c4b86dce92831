"""A policy as data: which named strategies fill each slot, and the parameters.

The value of a slot is the name of the file in `afl/sched/policies/` that provides the function, or a list of names
where several apply together.  What the slots mean:

    order(s, ticket, params) -> tuple                 key in the waiting queue, smallest first; made when it is queued
    select(s, rows, left, params) -> attempts         who is served: a list of (rows, left, admit), tried in turn until
                                                      one gives a plan; rows intp [r] in the order of service, left
                                                      int32 [r], 0 to leave a row out, admit: whether to look at waiting
    victim(s, rows, params) -> row                    whom to preempt; rows int32 [r] in admission order
    action(s, row, params) -> "recompute" | "swap"    what becomes of the victim's blocks
    chunk*(s, start, left, granted, params) -> [r]    caps on the tokens of rows that have computed `start` and want
                                                      `left` (int32 [r]); granted: (start, tokens) given before them in
                                                      this step.  The smallest of several caps holds
    admit*(candidate, params) -> Verdict | None       an objection to admitting a request now
    observe(value, s, event, params) -> value         what the file learns from `Timed`, `Peers` and `Tick` events; kept
                                                      in `s.learned[file]`, None at first

`rules(policy, config) -> list` of a file says what it cannot be combined with.  Slots marked * hold several names.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import attrs

from afl.errors import ConfigError, unknown, violations

SINGLE = ("order", "select", "victim", "action")
SEVERAL = ("chunk", "admit")
SLOTS = (*SINGLE, *SEVERAL)


def _pairs(params: Any) -> tuple[tuple[str, Any], ...]:
    fixed = params.items() if isinstance(params, Mapping) else (tuple(p) for p in params)
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in fixed))


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen(cache_hash=True)
class Policy:
    """Named strategies and their parameters.

    >>> Policy.from_json(Policy(order="priority").to_json()) == Policy(order="priority")
    True
    """

    order: str = "fcfs"
    select: str = "fcfs"
    victim: str = "fcfs"
    action: str = "fcfs"
    chunk: tuple[str, ...] = attrs.field(default=("fcfs",), converter=_names)
    admit: tuple[str, ...] = attrs.field(default=(), converter=_names)
    params: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=_pairs)

    def files(self) -> list[str]:
        """The policy files in use, each once."""
        return list(dict.fromkeys([getattr(self, s) for s in SINGLE] + [*self.chunk, *self.admit]))

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads."""
        return json.dumps({s: getattr(self, s) for s in SLOTS} | {"params": dict(self.params)})

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """The policy of a JSON object; an unknown slot, strategy or parameter is a `ConfigError`."""
        try:
            record = json.loads(text)
        except ValueError as e:
            raise ConfigError(f"policy is not JSON: {e}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"policy must be a JSON object with {', '.join(SLOTS)} and params, got {text[:60]}")
        rows = [unknown("policy slot", key, (*SLOTS, "params")) for key in record if key not in (*SLOTS, "params")]
        for slot, value in record.items():
            good = isinstance(value, str) or (slot in SEVERAL and isinstance(value, list)
                                              and all(isinstance(v, str) for v in value))
            if slot in SLOTS and not good:
                more = " or a list of names" if slot in SEVERAL else ""
                rows.append(f"policy slot {slot} takes a name{more}, got {value!r}")
        if not isinstance(record.get("params", {}), dict):
            rows.append(f"policy params must be an object, got {record['params']!r}")
        if rows:
            raise ConfigError(violations("policy that does not hold", rows))
        policy = cls(**record)
        bind(policy)
        return policy

    @classmethod
    def read(cls, text: str) -> "Policy":
        """From a name, names joined by +, a JSON object, or the path of a file that holds one."""
        from afl.sched import policies

        if text.lstrip().startswith("{"):
            return cls.from_json(text)
        if text.endswith(".json"):
            try:
                with open(text, encoding="utf-8") as f:
                    return cls.from_json(f.read())
            except OSError as e:
                raise ConfigError(f"policy file {text}: {e.strerror}") from None
        return policies.compose(*text.split("+"))


@attrs.frozen(eq=False)
class Verdict:
    """An objection to admitting a request.  stop: nobody behind it is looked at; else it is queued with a fresh key."""

    rule: str
    a: Any = 0
    b: Any = 0
    stop: bool = True


@attrs.frozen(eq=False)
class Candidate:
    """A waiting request that is looked at: what a gate may ask."""

    s: Any                        # SchedState
    ticket: Any                   # Ticket
    hit: int                      # cached tokens
    tokens: int                   # tokens it would compute in this step
    blocks: int                   # blocks it takes out of `spare`
    spare: int                    # blocks neither taken nor promised
    running: int                  # rows that run, those admitted before it in this step included
    granted: tuple[tuple[int, int], ...]           # (start, tokens) given in this step


@attrs.frozen(eq=False)
class Bound:
    """The functions of a policy, parameters applied."""

    order: Callable
    select: Callable | None
    victim: Callable
    action: Callable
    chunk: tuple[Callable, ...]
    admit: tuple[Callable, ...]
    observe: tuple[tuple[str, Callable], ...]
    params: dict[str, Any]


@lru_cache(maxsize=256)
def bind(policy: Policy) -> Bound:
    """Look the strategies up; raises `ConfigError` with every unknown name and parameter."""
    from afl.sched import policies

    files = {name: policies.load(name) for name in policy.files()}
    params: dict[str, Any] = {}
    rows = []
    for file in (policies.load("fcfs"), *files.values()):
        params |= file.params
    for name, value in policy.params:
        if name not in params:
            rows.append(unknown("policy parameter", name, params))
        elif isinstance(params[name], int | float) != isinstance(value, int | float):
            rows.append(f"policy parameter {name} takes a value like {params[name]!r}, got {value!r}")
        params[name] = value
    for slot in SLOTS:
        for name in _names(getattr(policy, slot)):
            if getattr(files[name], slot) is None and not (slot in ("select", "action") and name == "fcfs"):
                rows.append(f"policy {name!r} has no {slot}; it provides {', '.join(files[name].slots)}")
    if rows:
        raise ConfigError(violations("policy that does not hold", rows))
    single: Any = {s: getattr(files[getattr(policy, s)], s) for s in SINGLE}
    several: Any = {s: tuple(getattr(files[n], s) for n in getattr(policy, s)) for s in SEVERAL}
    observe = tuple((n, f.observe) for n, f in files.items() if f.observe)
    bound = Bound(**single, **several, observe=observe, params=params)
    wrong = [row for f in files.values() if f.rules for row in f.rules(policy, params)]
    if wrong:
        raise ConfigError(violations("policies that do not go together", wrong))
    return bound
