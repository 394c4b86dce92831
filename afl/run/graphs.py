"""Decode steps of an engine as captured graphs: which ones, on which driver, and what they cost.

Captured are the programs of decode buckets, one token a row; prefill and mixed steps are bound by their kernels and run
as programs.  All share one pool and one arena, so they are captured largest first.
"""

from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor

from afl import device
from afl.config import EngineConfig
from afl.errors import CaptureError, ConfigError, violations
from afl.ir.buckets import Sizes, show_sizes
from afl.ir.capture import Arena, Captured, Pool, arena_bytes, capture, problems
from afl.ir.jit import Jitted
from afl.ir.program import BoundProgram


@attrs.define(eq=False)
class Graphs:
    """The captured programs of an engine.  `why`: in a few words, why there are none.

    replays, programs: steps that ran in a graph, and steps that did not although there are graphs.
    """

    driver: device.Driver
    captured: dict[BoundProgram, Captured] = attrs.field(factory=dict)
    why: str = ""
    pool_bytes: int = 0
    arena_bytes: int = 0
    replays: int = 0
    programs: int = 0

    def of(self, program: BoundProgram) -> Captured | None:
        """The graph of a program, if there is one; counts the step."""
        found = self.captured.get(program)
        if found is not None:
            self.replays += 1
        elif self.captured:
            self.programs += 1
        return found

    def home(self, static: Sequence[Tensor], state: Sequence[Tensor]) -> Sequence[Tensor]:
        """The state that a program left, at the addresses that graphs know: what lies elsewhere is copied there."""
        if not self.captured:
            return state
        for x, y in zip(static, state, strict=True):
            if x is not y and x.data_ptr() != y.data_ptr():
                x.copy_(y)
        return static

    def metrics(self) -> dict[str, int]:
        """Counts, and bytes that the graphs hold beside parameters and cache."""
        return {
            "graphs": len(self.captured), "graph_replays": self.replays, "graph_programs": self.programs,
            "graph_bytes": self.pool_bytes, "graph_input_bytes": self.arena_bytes,
        }

    def __str__(self) -> str:
        if not self.captured:
            return f"none: {self.why}"
        sizes = [show_sizes(p.sizes or {}) for p in self.captured]
        return (f"{len(sizes)} on {self.driver.name} ({sizes[0]} ... {sizes[-1]}), {self.replays} steps replayed, "
                f"{self.programs} run as programs, {self.pool_bytes + self.arena_bytes} bytes")


def decode_buckets(jitted: Jitted) -> list[Sizes]:
    """The declared sizes of steps with one token a row."""
    ladder = jitted.options.ladder
    return [] if ladder is None else [z for z in ladder.buckets() if z["tokens"] == z["rows"]]


def capture_decode(
    jitted: Sequence[tuple[Jitted, Sequence[Any]]], state: Sequence[Tensor], chip: Any, config: EngineConfig
) -> Graphs:
    """Capture what `config.graphs` asks for; jitted: functions, each with the padding values of its inputs.

    "auto" captures on a device and says why where it does not; "on" also emulates graphs on a host, and raises
    ConfigError with every reason where that cannot be.
    """
    asked = config.graphs == "on"
    driver = device.driver(state[0], emulate_graphs=asked)
    why = _reason_against(driver, chip, config)
    order = [] if why else [(j.program(**z), fills) for j, fills in jitted for z in decode_buckets(j)]
    if order:
        rows = list(dict.fromkeys(r for p, _ in (order[0], order[-1]) for r in problems(p, state, driver)))
        why = violations(f"reasons why {chip.name} captures no graphs of this model", rows) if rows else ""
    if not why:
        try:
            return _capture(order, state, driver, config.depth)
        except CaptureError as e:       # what only a run shows; programs remain
            why = str(e)
    if asked:
        raise ConfigError(f"graphs is 'on', which does not hold: {why}\nAsk for graphs 'auto' or 'off'.")
    return Graphs(driver, why=why)


def _capture(
    order: Sequence[tuple[BoundProgram, Sequence[Any]]], state: Sequence[Tensor], driver: device.Driver, depth: int
) -> Graphs:
    """All programs in graphs of one pool, the one with the most temporaries first."""
    made = Graphs(driver, arena_bytes=max((arena_bytes(p.program) for p, _ in order), default=0))
    arena, pool = Arena(driver, made.arena_bytes, depth), Pool(driver.pool())
    before = driver.memory()
    for p, fills in sorted(order, key=lambda x: -x[0].program.plan.peak):
        made.captured[p] = capture(p, state, arena, fills, driver, pool)
    # a device tells what its pool takes; a host that emulates one has no pool
    made.pool_bytes = driver.memory().reserved - before.reserved or pool.reserved
    return made


def _reason_against(driver: device.Driver, chip: Any, config: EngineConfig) -> str:
    if config.graphs == "off":
        return "they were not asked for"
    if not chip.captures:
        return f"chip {chip.name!r} captures no graphs"
    if config.eager or config.checked or config.references:
        which = "eager" if config.eager else "checked" if config.checked else "references"
        return f"{which} was asked for, and its steps cannot be captured"
    return "" if driver.graphs else "they are emulated on this host only if asked for"
