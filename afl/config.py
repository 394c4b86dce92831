"""Options of the engine as one frozen value, and the only place that reads the environment."""

import os
from collections.abc import Mapping
from pathlib import Path

import attrs

from afl.errors import ConfigError, nearest, unknown, violations

ENVIRONMENT = {
    "AFL_PLUGINS": "'off' ignores installed plugins",
    "AFL_LOG": "file that receives the engine's event log",
}

GRAPHS = ("auto", "on", "off")
RANGES = {      # option -> lowest and highest value
    "max_seqs": (1, 4096), "max_step_tokens": (1, 1 << 20), "depth": (1, 3), "kv_blocks": (0, 1 << 30),
    "block_tokens": (0, 1 << 16), "max_model_len": (0, 1 << 31), "threads": (0, 4096),
}


def out_of_range(name: str, value: object) -> str | None:
    """What is wrong with a value of an option in `RANGES`, or None."""
    low, high = RANGES[name]
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return None
    return f"{name} is {value!r:.40}, must be {low} to {high}"


def too_few_tokens(max_step_tokens: object, max_seqs: object) -> str | None:
    """What is wrong with a step of fewer tokens than requests, or None."""
    if not (isinstance(max_step_tokens, int) and isinstance(max_seqs, int) and 1 <= max_step_tokens < max_seqs):
        return None
    return (f"max_step_tokens ({max_step_tokens}) is below max_seqs ({max_seqs}): a step could not give every running "
            "request a token; raise the one or lower the other")


@attrs.frozen
class EngineConfig:
    """Everything that shapes an engine.  0 or None means: derive it (from the model, the host, the chip).

    block_tokens: tokens per cache block.  kv_blocks: usable cache blocks.  depth: steps in flight (1 or 2).
    policy: a name, names joined by +, a JSON object or the path of a .json file.  prefix_cache: reuse cached prefixes.
    strict: a trace that was not declared is an error.  references: ops run their reference bodies (slow).
    graphs: decode steps are replayed from captured graphs: auto (on a device), on (also emulated on a host) or off.
    eager: no program is traced.  checked: every op is checked for index ranges, NaN and result types.
    """

    chip: str = "cpu"
    dtype: str = "auto"
    weights: str = "auto"
    max_model_len: int = 0
    max_seqs: int = 64
    max_step_tokens: int = 1024
    kv_blocks: int = 0
    block_tokens: int = 0
    eager: bool = False
    checked: bool = False
    depth: int = 2
    threads: int = 0
    policy: str = "fcfs"
    prefix_cache: bool = True
    strict: bool = True
    references: bool = False
    seed: int | None = None
    log: str | None = None
    graphs: str = "auto"

    def __attrs_post_init__(self) -> None:
        rows = [text for name in RANGES if (text := out_of_range(name, getattr(self, name)))]
        rows += [text] if (text := too_few_tokens(self.max_step_tokens, self.max_seqs)) else []
        if self.graphs not in GRAPHS:
            rows.append(unknown("value of graphs", str(self.graphs), GRAPHS))
        if rows:
            raise ConfigError(violations("options that do not hold", rows))

    @classmethod
    def of(cls, options: Mapping[str, object]) -> "EngineConfig":
        """From a mapping of options; unknown names are errors with the nearest known one."""
        known = [f.name for f in attrs.fields(cls)]
        bad = [
            f"unknown option {k!r}" + (f"; did you mean {near[0]!r}?" if (near := nearest(k, known)) else "")
            for k in options
            if k not in known
        ]
        if bad:
            raise ConfigError(violations("unknown options", bad))
        return cls(**options)  # type: ignore[arg-type]


def environment() -> Mapping[str, str]:
    """The process environment, read-only by convention; pass it on instead of reading it elsewhere."""
    return os.environ


def plugins_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """False when AFL_PLUGINS is off."""
    value = (environment() if environ is None else environ).get("AFL_PLUGINS", "on")
    return value.lower() not in ("off", "0", "no", "false")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each AFL_ variable that nothing reads, with the nearest known name."""
    rows = []
    for name in environ if environ is not None else environment():
        if name.startswith("AFL_") and name not in ENVIRONMENT:
            near = nearest(name, ENVIRONMENT, 1)
            rows.append(f"environment variable {name} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    return rows


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still use: MemAvailable, capped by what its cgroups have left."""
    free = 1 << 62
    try:
        for row in (root / "proc/meminfo").read_text().splitlines():
            if row.startswith("MemAvailable:"):
                free = int(row.split()[1]) * 1024
    except OSError:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(free, _cgroup_left(root)))


def _cgroup_left(root: Path) -> int:
    """The tightest of the limits of this process's control group and of the groups above it, less what they use."""
    base = root / "sys/fs/cgroup"
    folders = [base, base / "memory"]
    try:
        for row in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = row.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                place = Path(path.lstrip("/"))
                folders += [(base / "memory" if controllers else base) / p for p in (place, *place.parents)]
    except OSError:
        pass
    left = 1 << 62
    for folder in folders:
        for limit, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            try:
                most = (folder / limit).read_text().strip()
                if most != "max":
                    # page cache that can be dropped counts as use: MemAvailable bounds from the other side
                    left = min(left, int(most) - int((folder / use).read_text()) + _droppable(folder))
            except (OSError, ValueError):
                continue
    return left


def _droppable(folder: Path) -> int:
    try:
        rows = (folder / "memory.stat").read_text().splitlines()
        return sum(int(r.split()[1]) for r in rows if r.startswith("inactive_file "))
    except OSError:
        return 0


_PROCESS = os.getpid()


def forked() -> bool:
    """Whether this process was forked after afl was imported: threads of its parent are not in it."""
    return os.getpid() != _PROCESS


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
