"""Serving in virtual time: requests arrive by the clock, a step takes what a cost model says."""

import attrs
import numpy as np

from afl.sched import Arrived, Peers, Sampled, Tick, Timed, check, init, step
from afl.sched.timing import Quad, features


@attrs.define
class Served:
    """When things happened to each request, in seconds, and totals."""

    first: dict = attrs.field(factory=dict)       # id -> time to first token
    gaps: list = attrs.field(factory=list)        # between tokens of one request
    done: dict = attrs.field(factory=dict)        # id -> time of the finish
    seconds: float = 0.0
    state: object = None
    steps: list = attrs.field(factory=list)       # (plan, ms)


CHIP = Quad(2e-6, 0.02, 3.0)


def serve(config, policy, requests, quad=CHIP, decode_ms=0.05, swap_ms=0.0, noise=0.0, seed=0):
    """Serve requests that carry their arrival times; each decoding row adds `decode_ms` to a step."""
    s, now, out, waiting, last = init(config, policy), 0.0, Served(), sorted(requests, key=lambda r: r.arrival), {}
    rng, events = np.random.default_rng(seed), []
    while waiting or s.busy:
        while waiting and waiting[0].arrival <= now:
            events.append(Arrived(waiting.pop(0)))
        s, plan, done = step(s, [Tick(now), *events], policy)
        events = []
        for id, token, why in done.rows():
            if token >= 0:
                if id in last:
                    out.gaps.append(now - last[id])
                else:
                    out.first[id] = now
                last[id] = now
            if why:
                out.done[id] = now
        if plan is None:
            now = max(now, waiting[0].arrival) if waiting else now
            assert waiting or not s.busy, s.frame()
            continue
        prompt = plan.grant > 1
        ms = quad.c + sum(quad.ms(int(a), int(n)) for a, n in zip(plan.start[prompt], plan.grant[prompt], strict=True))
        ms += decode_ms * int((~prompt).sum()) + swap_ms * (len(plan.out.device) + len(plan.back.device))
        ms *= 1 + noise * rng.standard_normal()
        now += ms / 1e3
        out.seconds += ms / 1e3
        out.steps.append((plan, ms))
        events = [Sampled(plan.step, np.full(len(plan.rows), 1)), Timed(plan.step, features(plan), ms)]
    check(s)
    out.state = s
    for r in requests:
        out.first[r.id] = out.first.get(r.id, float("inf")) - r.arrival
    return out


def ranks(config, policy, loads, decode_ms=0.05, quad=CHIP):
    """Data-parallel ranks in lockstep: a step takes as long as its slowest rank.  loads: requests per rank, all at 0.

    Returns (seconds, tokens, mean of max/mean blocks held while all are busy, idle rank steps).
    """
    states = [init(config, policy) for _ in loads]
    events = [[Arrived(r) for r in rs] for rs in loads]
    seconds, tokens, skew, idle, turns = 0.0, 0, [], 0, 0
    while any(s.busy for s in states) or any(events):
        held = [s.config.blocks - s.pool.free for s in states]
        wait = [s.waiting + len(e) for s, e in zip(states, events, strict=True)]
        told = [len(s.running) for s in states], wait, held
        plans = []
        for i in range(len(states)):
            states[i], plan, out = step(states[i], [Peers(i, *told), *events[i]], policy)
            tokens += len(out)
            plans.append(plan)
            events[i] = [] if plan is None else [Sampled(plan.step, np.full(len(plan.rows), 1))]
        times = [0.0 if p is None else sum(
            quad.ms(int(a), int(n)) if n > 1 else decode_ms for a, n in zip(p.start, p.grant, strict=True))
            for p in plans]
        idle += sum(p is None for p in plans)
        seconds += (quad.c + max(times)) / 1e3
        held = [s.config.blocks - s.pool.free for s in states]
        if all(s.busy for s in states):               # as long as there is something to balance
            skew.append(max(held) / (sum(held) / len(held)))
        turns += 1
        assert turns < 100_000, "ranks stand still"
    return seconds, tokens, float(np.mean(skew or [1.0])), idle
