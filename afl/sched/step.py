"""The transition: events in, plan and outputs out.  No clock, no randomness, no I/O."""

from collections.abc import Iterable

import numpy as np

from afl.sched import events as ev
from afl.sched.admit import Admitted, admit, head_note, take_blocks
from afl.sched.arrivals import abort, arrive, expire, feed, finish, grammar, rank, reorder
from afl.sched.events import Aborted, Arrived, Event, Sampled
from afl.sched.grants import Grants, grant_running, wants_of
from afl.sched.loops import compiled, gather
from afl.sched.naming import name_rows, seal
from afl.sched.notes import NOTHING as NO_NOTES
from afl.sched.outputs import ABORT, NOTHING, Outputs, merge
from afl.sched.plan import NO_COPIES, Copies, Plan
from afl.sched.policy import Bound, Policy, bind
from afl.sched.results import loaded, observe
from afl.sched.rows import preempt, unpin
from afl.sched.state import SchedState, evolve


def step(s: SchedState, events: Iterable[Event], policy: Policy) -> tuple[SchedState, Plan | None, Outputs]:
    """Apply `events`, then plan the next step.

    Whatever their order in `events`: clock, pauses and measurements come first, then aborts, results, arrivals, news
    of single requests, and aborts of those new arrivals.

    >>> from afl.sched import Arrived, Policy, Request, SchedConfig, init
    >>> s, plan, _ = step(init(SchedConfig(4, 8, 32, 8, 4)), [Arrived(Request("a", [5, 6, 7], 2))], Policy())
    >>> plan
    Plan(step 1, 3 tokens: a:3)
    """
    first, aborts, results, arrivals, news, late, parts = [], [], [], [], [], [], []
    new: set[str] = set()
    for e in events:
        if isinstance(e, Sampled):
            results.append(e)
        elif isinstance(e, Arrived):
            arrivals.append(e)
            new.add(e.request.id)
        elif isinstance(e, Aborted):
            (late if e.id in new else aborts).append(e)
        elif isinstance(e, _FIRST):
            first.append(e)
        else:
            news.append(e)
    for e in first:
        s, out = on_event(s, e)
        parts.append(out)
    if aborts:
        s, out = abort(s, aborts)
        parts.append(out)
    for e in results:
        s, out = observe(s, e)
        parts.append(out)
    if arrivals:
        s, out = arrive(s, arrivals)
        parts.append(out)
    for e in news:
        s, out = on_event(s, e)
        parts.append(out)
    if late:
        s, out = abort(s, late)
        parts.append(out)
    s, plan = schedule(s, policy)
    return s, plan, merge(parts)


_FIRST = (ev.Tick, ev.Paused, ev.Resumed, ev.Reset, ev.Timed, ev.Peers)


def on_event(s: SchedState, e: Event) -> tuple[SchedState, Outputs]:
    """Apply one event."""
    match e:
        case Sampled():
            return observe(s, e)
        case Arrived():
            return arrive(s, [e])
        case Aborted():
            return abort(s, [e])
        case ev.Tick():
            return expire(_learned(evolve(s, now=max(s.now, e.now)), e))
        case ev.Timed() | ev.Peers():
            return _learned(s, e), NOTHING
        case ev.Paused():
            return _paused(s, e.mode)
        case ev.Resumed():
            return evolve(s, pause=""), NOTHING
        case ev.Reset():
            return evolve(seal(s), weights=s.weights if e.weights is None else e.weights), NOTHING
        case ev.Grammar():
            return grammar(s, e)
        case ev.Input():
            return feed(s, e)
        case ev.Loaded():
            return loaded(s, e)
        case ev.Sent():
            return unpin(s, e.id, e.reader), NOTHING
        case ev.Ranked():
            return rank(s, e), NOTHING
    raise TypeError(f"not a scheduler event: {e!r}")


def schedule(s: SchedState, policy: Policy) -> tuple[SchedState, Plan | None]:
    """The next plan, None if nothing can be done now; it counts as in flight from here on."""
    bound = bind(policy)
    if policy is not s.queue.policy and policy != s.queue.policy:
        s = reorder(s, policy)
    if s.pause == "keep":
        return s, None
    wants = wants_of(s, s.config.drafts)
    if bound.select is None:
        attempts = ((s.running, wants.left, True),)
    else:
        attempts = bound.select(s, s.running, wants.left, bound.params)
    made = s, None
    for rows, left, admits in attempts:
        made = _attempt(s, bound, wants, rows, left, admits and not s.pause)
        if made[1] is not None:
            break
    return made


def _attempt(s: SchedState, bound: Bound, wants, rows, left, admits: bool) -> tuple[SchedState, Plan | None]:
    g = grant_running(s, bound, wants, rows, left)
    step = s.step
    notes, start, new = g.notes, np.zeros(0, np.int32), _NOBODY
    s = evolve(s, step=step + 1)
    if g.fates:
        s = preempt(s, g.fates)
    if len(g.rows):
        s, start = take_blocks(s, g.rows, g.grant)
        s = name_rows(s, g.rows)
    if g.fates and admits:
        notes = notes + head_note(s, "preemption", g.notes.ids)
    elif admits and s.queue.size:
        asked = bound.admit or len(bound.chunk) > 1
        granted = tuple(zip(start.tolist(), g.grant.tolist(), strict=True)) if asked else ()
        s, new = admit(s, bound, g.budget, g.spare, granted)
        notes = notes + new.notes
    if notes is not NO_NOTES or s.notes is not NO_NOTES:
        s = evolve(s, notes=notes, counts=notes.count(s.counts))
    if not len(g.rows) and not new.rows and not new.loads:
        return evolve(s, step=step), None
    return _hand_out(s, g, start, new)


_NOBODY = Admitted()


def tokens_for(s: SchedState, plan: Plan) -> np.ndarray:
    """Token ids of the plan, flat in plan order, int32 [t].

    -1 - row where the host does not know the token yet: it is the last one sampled in that row, on the device; draft
    tokens are of that kind too.
    """
    rows, position = plan.at, plan.start
    if plan.tokens != len(rows):
        rows = np.repeat(rows, plan.grant)
        first = np.cumsum(plan.grant) - plan.grant
        position = np.arange(len(rows), dtype=np.int32) - np.repeat(first - plan.start, plan.grant)
    last = s.tokens.lengths[rows] - 1
    tokens = s.tokens.at(rows, np.minimum(position, last))
    return np.where(position <= last, tokens, -1 - rows).astype(np.int32)


def _hand_out(s: SchedState, g: Grants, start: np.ndarray, new: Admitted) -> tuple[SchedState, Plan]:
    """Record the plan as in flight; its blocks are taken."""
    c, rows, grant, emit, drafts = s.config, g.rows, g.grant, g.emit, g.drafts
    if new.rows:
        more = np.array(new.rows, np.intp)
        count, at = np.array(new.grant, np.int32), np.array(new.start, np.int32)
        emit = np.concatenate([emit, s.tokens.lengths[more] == at + count])
        drafts = np.concatenate([drafts, np.zeros(len(more), np.int32)])
        rows, grant, start = np.concatenate([rows, more]), np.concatenate([grant, count]), np.concatenate([start, at])
    blocks, table, n = [], s.table.array, c.max_seqs
    for k in range(len(c.groups)):
        width = int(s.nblk[rows + k * n].max()) if len(rows) else 0
        out = np.empty((len(rows), width), np.int32)
        compiled(gather)(rows, k * n * c.width, c.width, table, out)
        blocks.append(out)
    plan = Plan(
        s.step, rows.astype(np.int32), s.ids[rows], start, grant, emit, drafts, tuple(blocks), rows, int(grant.sum()),
        bool(np.count_nonzero(s.needs_host[rows] & emit)), new.loads, _joined(s.outgoing), _joined(new.back))
    if not len(rows):
        return evolve(s, step=s.step - 1, outgoing=()), plan
    return evolve(s, inflight=(*s.inflight, plan), outgoing=()), plan


def _joined(copies: tuple[Copies, ...]) -> Copies:
    if not copies:
        return NO_COPIES
    return Copies(np.concatenate([c.device for c in copies]), np.concatenate([c.host for c in copies]))


def _learned(s: SchedState, e: Event) -> SchedState:
    """Let the policy files that learn see an event."""
    bound = bind(s.queue.policy)
    if not bound.observe:
        return s
    return evolve(s, learned={**s.learned, **{n: f(s.learned.get(n), s, e, bound.params) for n, f in bound.observe}})


def _paused(s: SchedState, mode: str) -> tuple[SchedState, Outputs]:
    if mode not in ("abort", "wait", "keep"):
        raise ValueError(f"pause mode {mode!r}; there are abort, wait and keep")
    s = evolve(s, pause="keep" if mode == "keep" else "wait")
    if mode != "abort" or not len(s.tickets):
        return s, NOTHING
    ids = sorted(s.tickets, key=lambda id: s.tickets[id].number)
    return finish(s, {id: ABORT for id in ids})
