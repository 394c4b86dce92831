"""`afl replay`: a scheduler's event log, executed again."""

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer

from afl.errors import BadInput

from .run import Json
from .terminal import write

Log = Annotated[Path, typer.Argument(metavar="LOG", help="A log that `afl run --log LOG` wrote, or a crash left.")]
Until = Annotated[int | None, typer.Option(
    "--until", metavar="STEP", min=0, help="Stop after this many calls of the scheduler.", show_default=False)]
Other = Annotated[str | None, typer.Option(
    "--policy", metavar="NAME|FILE", show_default=False,
    help="Serve the same requests with another policy too, and show the differences.")]
Trace = Annotated[Path | None, typer.Option(
    "--trace", metavar="FILE", show_default=False, help="Write the timeline for Perfetto or chrome://tracing.")]


def replay(log: Log, until: Until = None, policy: Other = None, trace: Trace = None, json: Json = False) -> None:
    """Execute a scheduler's event log again and show where it ends.

    The scheduler is a function of its events, so the log gives the same states each time. Results of another policy
    are the tokens of the log, at the speed of one call per step.

    \b
    Examples:
      afl run --file prompts.txt --log run.log
      afl replay run.log
      afl replay run.log --until 40 --trace run.json
      afl replay run.log --policy priority+watermark
    """
    from afl import sched  # numpy: not before a log is read
    from afl.sched import perfetto, whatif

    other = sched.Policy.read(policy) if policy is not None else None
    config, own, batches = sched.read(log)
    lists = list(batches)
    try:
        told = whatif.follow(config, own, lists, until)
        whole = whatif.follow(config, own, lists) if other is not None and until is not None else told
    except (AssertionError, LookupError, ValueError, TypeError) as e:
        raise BadInput(f"{log}: its events do not fit together: {type(e).__name__}: {e}") from None
    timelines = {"log": told}
    if other is not None:
        timelines[str(policy)] = whatif.another(config, other, lists, whole, until)
    if trace is not None:
        trace.write_text(json_.dumps(perfetto.trace(timelines[str(policy)] if other else told)), encoding="utf-8")
    if json:
        write(json_.dumps({name: summary(t) for name, t in timelines.items()}) + "\n")
        return
    write(told.state.frame() + "\n")
    for line in told.state.explain():
        write(f"  {line}\n")
    write("\n" + table({name: summary(t) for name, t in timelines.items()}))
    if other is not None:
        _differences(told, timelines[str(policy)], str(policy))


def summary(t: Any) -> dict[str, Any]:
    """Figures of a timeline."""
    first, ends, s = t.first(), t.finished(), t.state
    plans = [x.plan for x in t.turns if x.plan is not None]
    waits = sorted(first.values())
    return {
        "calls": len(t.turns), "plans": len(plans), "tokens computed": sum(p.tokens for p in plans),
        "requests finished": len(ends), "first token, median call": waits[len(waits) // 2] if waits else 0,
        "last finish, call": max(ends.values(), default=0), "preemptions": s.preemptions,
        "tokens computed again": s.recomputed, "prefix hits, tokens": s.hits, "results dropped": s.dropped,
    }


def table(columns: dict[str, dict[str, Any]]) -> str:
    """Figures side by side."""
    names = list(columns)
    rows = [["", *names], *([key, *(str(columns[n][key]) for n in names)] for key in columns[names[0]])]
    wide = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(
        zip(r, wide, strict=True))).rstrip() + "\n" for r in rows)


def _differences(a: Any, b: Any, name: str) -> None:
    from afl.sched import whatif

    if b.end:
        write(f"\n{name} ends at call {len(b.turns)}: {b.end}\n")
    found = whatif.first_difference(a, b)
    if found is None:
        write("\nboth make the same plans\n")
        return
    at, mine, theirs = found
    write(f"\nthe first difference is in call {at}:\n  log: {mine}\n  {name}: {theirs}\n")
    before, after = a.first(), b.first()
    moved = sorted((id for id in before if id in after and before[id] != after[id]),
                   key=lambda id: after[id] - before[id])
    if moved:
        rows = {id: {"log": before[id], name: after[id], "change": after[id] - before[id]}
                for id in [*moved[:5], *moved[5:][-5:]]}
        write(f"\nfirst tokens of {len(moved)} requests come in another call; the most and the least lucky:\n")
        flipped = {key: {id: row[key] for id, row in rows.items()} for key in ("log", name, "change")}
        write(table(flipped))
