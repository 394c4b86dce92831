"""Discovery: chips, models and ops of this package by file listing, others by the entry-point group `afl.plugins`.

Nothing is imported before somebody asks.  A plugin that fails to import is reported on stderr and skipped;
AFL_PLUGINS=off ignores all of them.
"""

import functools
import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from afl import chip as chips
from afl import config

_FAILED: dict[str, str] = {}


def _modules(package: str) -> list[str]:
    folder = Path(__file__).parent.joinpath(*package.split(".")[1:])
    return [f"{package}.{p.stem}" for p in sorted(folder.glob("*.py")) if p.stem != "__init__"]


@functools.cache
def load_plugins() -> dict[str, str]:
    """Import every installed plugin once; the result maps each failed one to its error."""
    if not config.plugins_enabled():
        return _FAILED
    for entry in entry_points(group="afl.plugins"):
        try:
            entry.load()
        except Exception as e:  # a broken extension must not take the runtime down; it is named instead
            _FAILED[entry.name] = f"{type(e).__name__}: {e}"
            print(f"afl: plugin {entry.name!r} was skipped: {_FAILED[entry.name]}", file=sys.stderr)
    return _FAILED


@functools.cache
def load_ops() -> None:
    """Import every op, cache kind, kernel family and chip of this package, then the plugins."""
    for package in ("afl.dist", "afl.ops", "afl.ops.caches", "afl.ops.quant", "afl.ops.kernels", "afl.ops.chips"):
        for name in _modules(package):
            importlib.import_module(name)
    load_plugins()


def chip(name: str) -> chips.Chip:
    """The chip of that name, with its kernels."""
    load_ops()
    return chips.get(name)


@functools.cache
def load_models() -> None:
    """Import every model file of this package, then the plugins."""
    load_ops()
    for name in _modules("afl.models"):
        importlib.import_module(name)


def model(architecture: str) -> Any:
    """The model definition of an architecture name of config.json."""
    from afl.models import spec

    load_models()
    return spec.get(architecture)
