"""Checks of options that need neither torch nor a checkpoint, so that wrong ones are refused at once, together."""

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import afl
from afl import chip as chips
from afl import config as configs
from afl.config import EngineConfig
from afl.run.ask import Ask, Wish
from afl.run.rules import refuse

_ROOT = Path(str(afl.__file__)).parent


def policies() -> list[str]:
    """Scheduler policies of this package, from the file listing."""
    files = (_ROOT / "sched" / "policies").glob("*.py")
    return sorted(f.stem for f in files if f.stem not in ("__init__", "registry"))


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The EngineConfig of the options, or one ConfigError with everything that does not hold."""
    wish: Any = Wish(options)
    refuse(Ask(wish, find_chip(wish.chip)))
    return EngineConfig(**options)


def find_chip(name: str) -> chips.Chip | None:
    """The chip, importing its file only; plugins are imported for a name that this package lacks."""
    if name not in chips.registered():
        folder = _ROOT / "ops" / "chips"
        stem = next((s for s in (name, f"a{name}") if s.isidentifier() and (folder / f"{s}.py").is_file()), None)
        if stem is not None:
            importlib.import_module(f"afl.ops.chips.{stem}")
        elif configs.plugins_enabled() and entry_points(group="afl.plugins"):
            from afl import plugins

            plugins.load_ops()
    return chips.registered().get(name)
