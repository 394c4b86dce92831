"""Finding policies by name: the files of this folder, imported on first use."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from afl.errors import ConfigError, unknown
from afl.sched.policy import SLOTS, Policy


@attrs.frozen(eq=False)
class PolicyFile:
    """What one policy file provides; a slot that is None is filled by `fcfs`."""

    name: str
    order: Callable | None = None
    victim: Callable | None = None
    chunk: Callable | None = None
    params: Mapping[str, Any] = attrs.field(factory=dict)      # parameter name -> default


_FILES: dict[str, PolicyFile] = {}


def register(name: str, **provides: Any) -> PolicyFile:
    """Called by a policy file: the slots it fills and its parameters with defaults."""
    _FILES[name] = PolicyFile(name, **provides)
    return _FILES[name]


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


def get(name: str, **params: Any) -> Policy:
    """The policy made of file `name`, with `params` set.

    >>> get("priority").order, get("priority").chunk
    ('priority', 'fcfs')
    """
    file = load(name)
    slots = {s: name if getattr(file, s) else "fcfs" for s in SLOTS}
    known = {**load("fcfs").params, **file.params}
    for p in params:
        if p not in known:
            raise ConfigError(unknown("policy parameter", p, known))
    return Policy(**slots, params=params)
