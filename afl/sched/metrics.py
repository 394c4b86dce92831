"""What a scheduler counts, as plain numbers."""

from afl.sched.state import SchedState


def metrics(s: SchedState) -> dict[str, int | float | dict[str, int]]:
    """Gauges and counters.  Counters never fall; what a preempted request finds again is apart from prefix hits.

    waiting: requests by what they wait for; the head of the queue is why the queue does not move.  skips: decisions
    against a request since the start, by rule.

    >>> from afl.sched import SchedConfig, init
    >>> metrics(init(SchedConfig(4, 8, 32, 8, 4)))["blocks_used"]
    0
    """
    c = s.config
    return {
        "running": len(s.running),
        "waiting": {"queue": s.waiting, "grammar": s.parked[0], "input": s.parked[1],
                    "remote": s.loading},
        "in_flight": len(s.inflight),
        "blocks": c.blocks,
        "blocks_used": c.blocks - s.pool.free,
        "blocks_pinned": sum(len(p.blocks) for pins in s.pins.values() for p in pins),
        "blocks_named": len(s.pool.blocks),
        "evictions": s.pool.evictions,
        "prompt_tokens": s.prompted,
        "prefix_queried_tokens": s.queried,
        "prefix_hit_tokens": s.hits,
        "prefix_hit_blocks": {f"{g} {spec.kind}": n for g, (spec, n) in enumerate(
            zip(c.groups, s.group_hits, strict=True))},
        "loaded_tokens": s.loaded,
        "preemptions": s.preemptions,
        "swaps": s.swaps,
        "recomputed_tokens": s.recomputed,
        "refound_tokens": s.refound,
        "draft_tokens": s.drafted,
        "accepted_tokens": s.accepted,
        "dropped_results": s.dropped,
        "skips": dict(sorted(s.counts.items())),
    }
