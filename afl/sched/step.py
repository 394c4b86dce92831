"""The transition: events in, plan and outputs out.  No clock, no randomness, no I/O."""

from collections.abc import Iterable, Mapping

import numpy as np

from afl.sched.admit import admit
from afl.sched.arrivals import abort, arrive
from afl.sched.events import Aborted, Arrived, Event, Sampled, Tick
from afl.sched.grants import counted, grant_running
from afl.sched.loops import compiled, empty32, extend, gather
from afl.sched.outputs import NOTHING, Outputs, merge
from afl.sched.plan import Plan
from afl.sched.policy import Policy, bind
from afl.sched.queue import build, entry_of
from afl.sched.results import observe
from afl.sched.rows import preempt
from afl.sched.state import SchedState, evolve, is_waiting


def step(s: SchedState, events: Iterable[Event], policy: Policy) -> tuple[SchedState, Plan | None, Outputs]:
    """Apply `events` (aborts, results, arrivals, aborts of those new arrivals), then plan the next step.

    >>> from afl.sched import Arrived, Policy, Request, SchedConfig, init
    >>> s, plan, _ = step(init(SchedConfig(4, 8, 32, 8, 4)), [Arrived(Request("a", [5, 6, 7], 2))], Policy())
    >>> plan
    Plan(step 1, 3 tokens: a:3)
    """
    aborts, results, arrivals, late, parts = [], [], [], [], []
    new: set[str] = set()
    for e in events:
        if type(e) is Sampled:
            results.append(e)
        elif type(e) is Arrived:
            arrivals.append(e)
            new.add(e.request.id)
        elif type(e) is Aborted:
            (late if e.id in new else aborts).append(e)
        else:
            s, _ = on_event(s, e)
    if aborts:
        s, out = abort(s, aborts)
        parts.append(out)
    for e in results:
        s, out = observe(s, e)
        parts.append(out)
    if arrivals:
        s, out = arrive(s, arrivals)
        parts.append(out)
    if late:
        s, out = abort(s, late)
        parts.append(out)
    s, plan = schedule(s, policy)
    return s, plan, merge(parts)


def on_event(s: SchedState, e: Event) -> tuple[SchedState, Outputs]:
    """Apply one event."""
    match e:
        case Sampled():
            return observe(s, e)
        case Arrived():
            return arrive(s, [e])
        case Aborted():
            return abort(s, [e])
        case Tick():
            return evolve(s, now=e.now), NOTHING
    raise TypeError(f"not a scheduler event: {e!r}")


def schedule(s: SchedState, policy: Policy) -> tuple[SchedState, Plan | None]:
    """The next plan, None if nothing can be computed now; it counts as in flight from here on."""
    bound = bind(policy)
    if policy is not s.queue.policy and policy != s.queue.policy:
        live = [s.tickets[e[2]] for e in s.queue.entries() if is_waiting(s, e)]
        s = evolve(s, queue=build(policy, [entry_of(policy, t.request, t.number) for t in live]))
    g = grant_running(s, bound)
    rows, grant, emit, reasons = g.rows, g.grant, g.emit, g.skips
    if g.victims:
        s = preempt(s, g.victims)
    elif s.queue.size:
        s, added, tokens, why = admit(s, bound, g.budget, g.spare)
        reasons = {**reasons, why: 1} if why else reasons
        if added:
            rows = np.concatenate([rows, np.array(added, np.intp)])
            grant = np.concatenate([grant, np.array(tokens, np.int32)])
            emit = np.concatenate([emit, s.tokens.lengths[added] == tokens])
    if not len(rows):
        return (evolve(s, skips=counted(s.skips, reasons)) if reasons else s), None
    return _hand_out(s, rows, grant, emit, reasons)


def tokens_for(s: SchedState, plan: Plan) -> np.ndarray:
    """Token ids of the plan, flat in plan order, int32 [t].

    -1 - row where the host does not know the token yet: it is the last one sampled in that row, on the device.
    """
    rows, position = plan.at, plan.start
    if plan.tokens != len(rows):
        rows = np.repeat(rows, plan.grant)
        first = np.cumsum(plan.grant) - plan.grant
        position = np.arange(len(rows), dtype=np.int32) - np.repeat(first - plan.start, plan.grant)
    last = s.tokens.lengths[rows] - 1
    tokens = s.tokens.at(rows, np.minimum(position, last))
    return np.where(position <= last, tokens, -1 - rows).astype(np.int32)


def _hand_out(s: SchedState, rows: np.ndarray, grant: np.ndarray, emit: np.ndarray, reasons: Mapping[str, int]):
    """Give the rows their blocks and record the plan as in flight."""
    sched, nblk, start, need = s.sched.copy(), s.nblk.copy(), empty32(len(rows)), empty32(len(rows))
    total, width, tokens = compiled(extend)(rows, grant, s.config.block_tokens, sched, nblk, start, need)
    table, pool = s.table, s.pool
    if total:
        ids, pool = pool.take(total)
        at = np.flatnonzero(need)
        count = need[at]
        within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
        table = table.set((np.repeat(rows[at], count), np.repeat(s.nblk[rows[at]], count) + within), ids)
    blocks = np.empty((len(rows), width), np.int32)
    compiled(gather)(rows, table.array, blocks)
    plan = Plan(s.step + 1, rows.astype(np.int32), s.ids[rows], start, grant, emit, blocks, rows, tokens,
                bool(np.count_nonzero(s.needs_host[rows] & emit)))
    s = evolve(s, step=s.step + 1, sched=sched, nblk=nblk, table=table, pool=pool, inflight=(*s.inflight, plan),
                     skips=counted(s.skips, reasons))
    return s, plan
