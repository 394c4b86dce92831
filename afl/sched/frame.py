"""The scheduler's state as a text table."""

from afl.sched.state import STATUS, SchedState, pending


def frame(s: SchedState) -> str:
    """One line per row in use, then queue, pool and counters."""
    pend = pending(s)
    lines = [f"{'row':>4} {'id':<16} {'status':<8} {'known':>6} {'pending':>7} {'sched':>6} {'limit':>6} {'blocks':>6}"]
    rows = [*s.running.tolist(), *(row for _, row in s.away), *(s.status == 2).nonzero()[0].tolist()]
    for r in rows[:40]:
        lines.append(f"{r:>4} {str(s.ids[r])[:16]:<16} {STATUS[s.status[r]]:<8} {s.tokens.lengths[r]:>6} {pend[r]:>7} "
                     f"{s.sched[r]:>6} {s.limit[r]:>6} {int(s.held[s.lanes(r)].sum()):>6}")
    if len(rows) > 40:
        lines.append(f"     ... {len(rows) - 40} more rows")
    skips = ", ".join(f"{name} {n}" for name, n in sorted(s.counts.items())) or "none"
    lines.append(f"step {s.step}, waiting {s.waiting}, in flight {len(s.inflight)}, blocks free {s.pool.free} of "
                 f"{s.pool.size}, preemptions {s.preemptions}, recomputed {s.recomputed}, "
                 f"hits {s.hits} of {s.queried}, dropped {s.dropped}, skips: {skips}")
    return "\n".join(lines)
