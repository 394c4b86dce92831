"""Balancing policies, one file each: `rebalance(load, now, topology, params) -> Placement`.  Listed, not imported."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology
from afl.errors import ConfigError, unknown

Rebalance = Callable[[LoadWindow, Placement, Topology, Params], Placement]


def names() -> list[str]:
    """All policy names, without importing their files."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]))


def load(name: str) -> Rebalance:
    """The `rebalance` function of a policy file; `ConfigError` with the known names if there is none."""
    if name not in names():
        raise ConfigError(unknown("balancing policy", name, names()))
    return importlib.import_module(f"{__package__}.{name}").rebalance
