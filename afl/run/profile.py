"""Where the time of a run goes: host phases and equations, as a Chrome trace and as a table of the dearest equations.

An engine that is not profiled holds nothing of this: profiled programs are other text, phases belong to a subclass.
Times are the host's: exact on chips whose kernels return when they are done, such as cpu; elsewhere an equation's time
is that of its submission.
"""

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from afl.config import EngineConfig
from afl.errors import ConfigError
from afl.ir.graph import line, numbering
from afl.ir.jit import Jitted
from afl.ir.profile import label, timed
from afl.ir.program import BoundProgram, Program
from afl.run.engine import Engine, Flight, StepResult

MOST_EVENTS = 200_000       # equations in a trace; of steps behind them it has the phases only
PHASES = {
    "land": "wait for the tokens of an earlier step",
    "schedule": "events into the scheduler, a plan out of it",
    "pack": "the batch and the sampling parameters of a plan",
    "trace": "a program is made, once",
    "program": "the equations",
    "detokenise": "text is made and shown between two turns",
}


@attrs.frozen
class Row:
    """Equations with the same label and kernel: how often they ran, and how long in all."""

    label: str
    kernel: str
    calls: int
    ns: int


class Profile:
    """What was noted: phases as (name, start, end), and per call of a program the times around its equations, in ns."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int]] = []
        self.calls: list[tuple[Program, np.ndarray]] = []       # int64 [equations + 1]

    def phases(self) -> dict[str, int]:
        """Nanoseconds of every phase."""
        out = dict.fromkeys(PHASES, 0)
        for name, start, end in self.spans:
            out[name] += end - start
        return out

    def rows(self) -> list[Row]:
        """All equations, dearest first."""
        found: dict[tuple[str, str], list[int]] = {}
        times: dict[Program, tuple[int, np.ndarray]] = {}
        for p, marks in self.calls:
            n, ns = times.get(p, (0, 0))
            times[p] = n + 1, ns + np.diff(marks)  # type: ignore[assignment]
        for p, (n, ns) in times.items():
            for e, k, one in zip(p.graph.eqns, p.plan.kernels, ns.tolist(), strict=True):
                total = found.setdefault((label(e, p.graph), k.name), [0, 0])
                total[0] += n
                total[1] += one
        return sorted((Row(*key, *total) for key, total in found.items()), key=lambda r: -r.ns)

    def table(self, most: int = 10) -> str:
        """Phases with their shares of the time, then the dearest equations with theirs of all equations."""
        phases = {k: v for k, v in self.phases().items() if v}
        wall = max(sum(phases.values()), 1)
        text = [f"{'phase':<38}{'ms':>10}{'share':>8}"]
        text += [f"{name:<38}{ns / 1e6:>10.2f}{ns / wall:>8.1%}" for name, ns in phases.items()]
        rows = self.rows()
        total = max(sum(r.ns for r in rows), 1)
        text += ["", f"{'equation':<38}{'kernel':<22}{'calls':>8}{'ms':>10}{'us each':>10}{'share':>8}"]
        for r in rows[:most]:
            text.append(f"{r.label:<38}{r.kernel:<22}{r.calls:>8}{r.ns / 1e6:>10.2f}{r.ns / 1e3 / r.calls:>10.1f}"
                        f"{r.ns / total:>8.1%}")
        rest = sum(r.ns for r in rows[most:])
        if rest:
            text.append(f"{f'{len(rows) - most} others':<38}{'':<22}{sum(r.calls for r in rows[most:]):>8}"
                        f"{rest / 1e6:>10.2f}{'':>10}{rest / total:>8.1%}")
        return "\n".join(text)

    def trace(self) -> dict[str, Any]:
        """The profile as JSON values that Perfetto and chrome://tracing show: a track of phases, one of equations."""
        zero = min((start for _, start, _ in self.spans), default=0)
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "afl"}},
            *({"ph": "M", "pid": 1, "tid": t, "name": "thread_name", "args": {"name": name}}
              for t, name in enumerate(("phases", "equations"))),
        ]
        for name, start, end in self.spans:
            events.append({"ph": "X", "pid": 1, "tid": 0, "name": name, "cat": "phase", "ts": (start - zero) / 1e3,
                           "dur": (end - start) / 1e3})
        left = sum(len(p.graph.eqns) for p, _ in self.calls) - MOST_EVENTS
        events += itertools.islice(self._equations(zero), MOST_EVENTS)
        other = {"equations left out": left} if left > 0 else {}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def _equations(self, zero: int) -> Iterator[dict[str, Any]]:
        texts: dict[Program, list[tuple[str, dict[str, Any]]]] = {}
        for p, marks in self.calls:
            if p not in texts:
                n = numbering(p.graph)
                texts[p] = [
                    (label(e, p.graph), {"program": p.name, "number": i, "kernel": k.name, "source": e.where,
                                         "equation": line(e, n)})
                    for i, (e, k) in enumerate(zip(p.graph.eqns, p.plan.kernels, strict=True))
                ]
            at = ((marks - zero) / 1e3).tolist()
            for (name, args), start, end in zip(texts[p], at, at[1:], strict=False):
                yield {"ph": "X", "pid": 1, "tid": 1, "name": name, "cat": "equation", "ts": start, "dur": end - start,
                       "args": args}

    def write(self, path: str | Path) -> None:
        """The trace as a file."""
        Path(path).write_text(json.dumps(self.trace()))


class _Timed:
    """A jitted function whose programs note their times."""

    def __init__(self, jitted: Jitted, profile: Profile) -> None:
        self._jitted, self._profile = jitted, profile
        self._made: dict[BoundProgram, BoundProgram] = {}
        self._marks: list[int] = []

    def program(self, **sizes: int) -> BoundProgram:
        start = time.perf_counter_ns()
        found = self._jitted.program(**sizes)
        if found not in self._made:
            self._made[found] = timed(found, lambda: self._marks.append(time.perf_counter_ns()))
            self._profile.spans.append(("trace", start, time.perf_counter_ns()))
        self._now = found.program
        return self._made[found]

    def take(self) -> tuple[Program, np.ndarray] | None:
        """The last call."""
        if not self._marks:
            return None
        call = self._now, np.array(self._marks, np.int64)
        self._marks.clear()
        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


class ProfiledEngine(Engine):
    """An engine that notes in `profile` where its time goes.  It replays no captured graphs: they have no equations."""

    def __init__(self, model: Any, config: EngineConfig | None = None) -> None:
        super().__init__(model, config)
        if self.config.eager:
            raise ConfigError("a profile is of programs, and eager traces none; leave one of the two out")
        self.profile = Profile()
        self.greedy = _Timed(self.greedy, self.profile)  # type: ignore[assignment]
        self.sampled = _Timed(self.sampled, self.profile)  # type: ignore[assignment]
        self._at = 0        # when the phase that goes on began

    def step(self) -> StepResult:
        if self._at:
            self._end("detokenise")
        self._at = time.perf_counter_ns()
        result = super().step()
        self._at = time.perf_counter_ns()
        return result

    def _land(self, f: Flight) -> Any:
        landed = super()._land(f)
        self._end("land")
        return landed

    def _launch(self, plan: Any) -> Flight:
        self._end("schedule")
        return super()._launch(plan)

    def _run(self, *arguments: Any) -> Any:
        self._end("pack")
        out = super()._run(*arguments)
        for it in (self.greedy, self.sampled):
            call = it.take()  # type: ignore[attr-defined]
            if call is not None:
                self.profile.calls.append(call)
                self.profile.spans.append(("program", int(call[1][0]), int(call[1][-1])))
        return out

    def _end(self, phase: str) -> None:
        now = time.perf_counter_ns()
        self.profile.spans.append((phase, self._at, now))
        self._at = now
