"""Finding policies by name: the files of this folder, imported on first use; and composing them."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from afl.errors import ConfigError, unknown
from afl.sched.policy import SEVERAL, SINGLE, SLOTS, Policy, bind


@attrs.frozen(eq=False)
class PolicyFile:
    """What one policy file provides; see `afl/sched/policy.py` for the slots."""

    name: str
    order: Callable | None = None
    select: Callable | None = None
    victim: Callable | None = None
    action: Callable | None = None
    chunk: Callable | None = None
    admit: Callable | None = None
    observe: Callable | None = None
    rules: Callable | None = None
    params: Mapping[str, Any] = attrs.field(factory=dict)      # parameter name -> default
    needs: tuple[str, ...] = ()   # of the driver: "clock" (Tick), "timing" (Timed), "peers" (Peers), "host" (memory);
    #                               of requests: "priority", "deadline"

    @property
    def slots(self) -> list[str]:
        """The slots it can fill."""
        return [s for s in SLOTS if getattr(self, s)]


def needs(policy: Policy) -> frozenset[str]:
    """What a policy asks of the driver ("clock", "timing", "peers", "host") and of requests ("priority", "deadline").

    >>> sorted(needs(Policy()))
    []
    """
    return frozenset(n for name in policy.files() for n in load(name).needs)


_FILES: dict[str, PolicyFile] = {}


def register(name: str, **provides: Any) -> PolicyFile:
    """Called by a policy file: the slots it fills and its parameters with defaults."""
    file = PolicyFile(name, **provides)
    for other in _FILES.values():
        shared = set(other.params) & set(file.params)
        assert other.name == name or not shared, f"policies {name} and {other.name} share parameters {shared}"
    _FILES[name] = file
    return file


def names() -> list[str]:
    """All policy names, without importing their files."""
    found = {m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])} - {"registry"}
    return sorted(found | set(_FILES))


def load(name: str) -> PolicyFile:
    """The policy file `name`, imported if need be; `ConfigError` if there is none."""
    if name not in _FILES:
        if name not in names():
            raise ConfigError(unknown("scheduler policy", name, names()))
        importlib.import_module(f"{__package__}.{name}")
    return _FILES[name]


def compose(*parts: str | Policy, **params: Any) -> Policy:
    """The policy that has every slot of `parts` (names or policies); caps and gates of all of them apply.

    Raises ConfigError if two parts fill the same single slot.

    >>> p = compose("priority", "watermark", watermark=0.1)
    >>> p.order, p.chunk, p.admit
    ('priority', ('fcfs',), ('watermark',))
    """
    single: dict[str, str] = {}
    several: dict[str, tuple[str, ...]] = {"chunk": ("fcfs",), "admit": ()}
    values: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, Policy):
            found = {s: getattr(part, s) for s in SINGLE if getattr(part, s) != "fcfs"}
            more = {s: getattr(part, s) for s in SEVERAL}
            values |= dict(part.params)
        else:
            file = load(part)
            found = {s: part for s in SINGLE if getattr(file, s) and part != "fcfs"}
            more = {s: (part,) if getattr(file, s) else () for s in SEVERAL}
        for slot, name in found.items():
            if single.setdefault(slot, name) != name:
                raise ConfigError(f"policies {single[slot]!r} and {name!r} both decide {slot}; choose one of them, or "
                                  f"write a policy file in JSON that says which")
        several = {s: tuple(dict.fromkeys(several[s] + more[s])) for s in SEVERAL}
    slots: dict[str, Any] = {**single, **several}
    policy = Policy(**slots, params=values | params)
    bind(policy)
    return policy


def get(name: str, **params: Any) -> Policy:
    """The policy made of file `name`, with `params` set.

    >>> get("priority").order, get("priority").chunk
    ('priority', ('fcfs',))
    """
    return compose(name, **params)
