"""A timeline as a trace that Perfetto and chrome://tracing show: a track per device row, counters, decisions."""

from typing import Any

from afl.sched.whatif import Timeline


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as JSON values.  A step without a measured time is one millisecond long."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "scheduler"}}]
    now = 0.0
    rows: set[int] = set()
    for turn in timeline.turns:
        plan, us = turn.plan, turn.ms * 1e3
        if plan is not None:
            for id, row, start, n, emit, drafts in zip(
                plan.ids, plan.rows.tolist(), plan.start.tolist(), plan.grant.tolist(), plan.emit.tolist(),
                plan.drafts.tolist(), strict=True,
            ):
                rows.add(row)
                args = {"step": plan.step, "start": start, "tokens": n, "drafts": drafts, "samples": emit}
                events.append({"ph": "X", "pid": 1, "tid": row, "ts": now, "dur": us, "name": id, "cat": "grant",
                               "args": args})
        counts = {"running": turn.running, "waiting": turn.waiting}
        events.append({"ph": "C", "pid": 1, "ts": now, "name": "requests", "args": counts})
        events.append({"ph": "C", "pid": 1, "ts": now, "name": "free blocks", "args": {"blocks": turn.free}})
        for id, line in zip(turn.notes.ids, turn.notes.lines(), strict=True):
            events.append({"ph": "i", "pid": 1, "ts": now, "s": "p", "name": line, "cat": "decision",
                           "args": {"request": id}})
        now += us if plan is not None else 0.0
    names = [{"ph": "M", "pid": 1, "tid": r, "name": "thread_name", "args": {"name": f"row {r}"}} for r in sorted(rows)]
    return {"traceEvents": events + names, "displayTimeUnit": "ms"}
