"""A policy as data: which named strategy fills each slot, and the parameters.

The value of a slot is the name of the file in `afl/sched/policies/` that provides the function; a file may leave
slots out, then the `fcfs` function is used.  What the slots mean:

    order(request, number, params) -> tuple          key in the waiting queue, smallest first; number = arrival number
    victim(state, rows, params) -> row               whom to preempt; rows int32 [r], candidates in admission order
    chunk(state, left, params) -> int32 [r]          cap on the tokens of each row in this step; left = tokens wanted
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import attrs

from afl.errors import ConfigError, unknown

SLOTS = ("order", "victim", "chunk")


def _pairs(params: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items() if isinstance(params, Mapping) else (tuple(p) for p in params)))


@attrs.frozen(cache_hash=True)
class Policy:
    """Named strategies and their parameters.

    >>> Policy.from_json(Policy(order="priority").to_json()) == Policy(order="priority")
    True
    """

    order: str = "fcfs"
    victim: str = "fcfs"
    chunk: str = "fcfs"
    params: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=_pairs)

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
        for key in record:
            if key not in (*SLOTS, "params"):
                raise ConfigError(unknown("policy slot", key, (*SLOTS, "params")))
        policy = cls(**record)
        bind(policy)
        return policy


@attrs.frozen
class Bound:
    """The functions of a policy, parameters applied."""

    order: Callable
    victim: Callable
    chunk: Callable
    params: dict[str, Any]


@lru_cache(maxsize=64)
def bind(policy: Policy) -> Bound:
    """Look the strategies up; raises `ConfigError` for an unknown name."""
    from afl.sched import policies

    files = {slot: policies.load(getattr(policy, slot)) for slot in SLOTS}
    fallback = policies.load("fcfs")
    params: dict[str, Any] = dict(fallback.params)
    for file in files.values():
        params |= file.params
    for name, value in policy.params:
        if name not in params:
            raise ConfigError(unknown("policy parameter", name, params))
        params[name] = value
    chosen: Any = {s: getattr(files[s], s) or getattr(fallback, s) for s in SLOTS}
    return Bound(**chosen, params=params)
