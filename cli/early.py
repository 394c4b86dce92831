"""Checks of options that need neither torch nor a checkpoint, so that wrong ones are refused at once, together."""

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs

import afl
from afl import chip as chips
from afl import config as configs
from afl.config import EngineConfig
from afl.errors import ConfigError, unknown, violations

_ROOT = Path(str(afl.__file__)).parent


def policies() -> list[str]:
    """Scheduler policies of this package, from the file listing."""
    files = (_ROOT / "sched" / "policies").glob("*.py")
    return sorted(f.stem for f in files if f.stem not in ("__init__", "registry"))


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The EngineConfig of the options, or one ConfigError with everything that does not hold."""
    rows: list[str] = []
    made: EngineConfig | None = None
    try:
        made = EngineConfig(**options)
    except ConfigError as e:
        lines = str(e).splitlines()
        rows += [r.removeprefix("  - ") for r in (lines[1:] if len(lines) > 1 else lines)]
    values = {f.name: options.get(f.name, f.default) for f in attrs.fields(EngineConfig)}
    rows += _chip(values["chip"], values["dtype"])
    rows += _policy(values["policy"])
    cores = configs.usable_cores()
    if values["threads"] > cores:
        rows.append(f"threads is {values['threads']}, this process may use {cores} cores; more only slows it down")
    if rows or made is None:
        raise ConfigError(violations("options that do not hold", rows))
    return made


def _chip(name: str, dtype: str) -> list[str]:
    found = find_chip(name)
    if found is None:
        return [unknown("chip", name, chips.names())]
    if chips.DTYPE_ALIASES.get(dtype, dtype) not in ("auto", *found.dtypes):
        return [f"dtype {dtype!r} is not one of chip {name!r}: auto, {', '.join(found.dtypes)}"]
    return []


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


def _policy(name: str) -> list[str]:
    from afl.run.policies import policy_of

    try:
        policy_of(name)
    except ConfigError as e:
        return str(e).splitlines()
    return []
