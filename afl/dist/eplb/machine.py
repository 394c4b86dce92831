"""Heat, planning, moving: what an expert-parallel rank does about balance, as a fold over events.

Every rank runs the same fold.  What must agree (phase, placement, epoch) changes at step boundaries only, as a function
of the reports that all ranks exchange there.  A plan that arrives, a planner that dies, a round whose copies are done
are local events and change nothing but this rank's next report.  So ranks cannot come to differ, in whatever order
local events happen, and nothing ever waits: a planner that is late or dead is simply not in the reports.

An aborted move leaves the committed placement as it is.  Copies that are already under way still write into staging
slots, so no new plan is made before they have ended on all ranks.
"""

import hashlib

import attrs
from attrs import evolve

from afl.dist.eplb.diff import apply
from afl.dist.eplb.events import (
    Abort,
    Boundary,
    Commit,
    Draining,
    DropStaged,
    Effect,
    Event,
    Failed,
    Heat,
    Moving,
    Phase,
    Planning,
    Report,
    RoundDone,
    StartPlan,
    StartRound,
    StopPlan,
)
from afl.dist.eplb.rounds import stages
from afl.dist.eplb.values import LoadWindow, Placement, Plan
from afl.errors import CheckFailed


@attrs.frozen
class Cadence:
    """How long each phase may take, in steps."""

    heat_steps: int = 600
    plan_steps: int = 50                # a plan that is not everywhere after so many steps is given up
    stall_steps: int = 1000             # a move without progress for so many steps is given up


@attrs.frozen(eq=False)
class Local:
    """What only this rank knows; the next report says it to the others."""

    plan: Plan | None = None
    digest: int = 0                     # of the plan
    finished: frozenset[int] = frozenset()
    failed: str = ""
    abort: str = ""


@attrs.frozen(eq=False)
class State:
    """All but `local` is the same on every rank at every boundary."""

    placement: Placement
    window: LoadWindow
    cadence: Cadence
    phase: Phase = Heat(0)
    step: int = 0
    epoch: int = 0                      # commits so far
    ticket: int = 0                     # plans asked for so far
    local: Local = Local()


def init(placement: Placement, experts: int, cadence: Cadence = Cadence()) -> State:  # noqa: B008
    """The state before the first step; raises `CheckFailed` for an invalid placement."""
    s = State(placement, _window(placement.layers, experts, 0, cadence), cadence)
    check(s)
    return s


def _window(layers: int, experts: int, start: int, cadence: Cadence) -> LoadWindow:
    return LoadWindow.empty(layers, experts, start=start, block_steps=-(-cadence.heat_steps // 64))


def check(s: State) -> None:
    """Raise `CheckFailed` unless the committed placement is valid."""
    bad = s.placement.check(s.window.experts)
    if bad:
        raise CheckFailed(f"epoch {s.epoch}: {'; '.join(bad[:5])}")


def report(s: State) -> Report:
    """What this rank tells the others at the coming boundary."""
    done = 0
    while done in s.local.finished:
        done += 1
    return Report(s.step, s.epoch, s.ticket, s.local.digest, done, bool(s.local.failed), bool(s.local.abort))


def digest(plan: Plan) -> int:
    """63 bits that two ranks' plans share if they are the same; never 0."""
    h = hashlib.sha256(plan.placement.phys_to_log.tobytes())
    h.update(repr((plan.rounds, plan.commits, plan.starts)).encode())
    return int.from_bytes(h.digest()[:8], "little") >> 1 | 1


def advance(s: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The state after an event, and what is to be done.

    An event with the ticket of an earlier plan is late and changes nothing.
    Raises `CheckFailed` if the ranks report different steps, epochs or tickets.
    """
    if isinstance(event, Boundary):
        return _boundary(s, event)
    if isinstance(event, Abort):
        return evolve(s, local=evolve(s.local, abort=event.why or "aborted")), ()
    if event.ticket != s.ticket:
        return s, ()
    if isinstance(event, RoundDone):
        if isinstance(s.phase, Moving | Draining) and event.index < s.phase.started:
            return evolve(s, local=evolve(s.local, finished=s.local.finished | {event.index})), ()
    elif isinstance(s.phase, Planning):
        if isinstance(event, Failed):
            return evolve(s, local=evolve(s.local, failed=event.why or "failed")), ()
        return evolve(s, local=evolve(s.local, plan=event.plan, digest=digest(event.plan))), ()
    return s, ()


def _boundary(s: State, b: Boundary) -> tuple[State, tuple[Effect, ...]]:
    _agree(s, b.reports)
    window = s.window if b.load is None else s.window.fold(b.load)
    s = evolve(s, step=s.step + 1, window=window)
    done = min(r.done for r in b.reports)
    abort = s.local.abort or ("another rank gave up" if any(r.abort for r in b.reports) else "")
    s = evolve(s, local=evolve(s.local, abort=""))
    match s.phase:
        case Heat():
            return _heat(s)
        case Planning():
            return _planning(s, b.reports, abort)
        case Moving():
            return _moving(s, done, abort)
        case Draining():
            return (_cool(s) if done >= s.phase.started else s), ()


def _agree(s: State, reports: tuple[Report, ...]) -> None:
    mine = (s.step, s.epoch, s.ticket)
    bad = [f"rank {i} is at step {r.step}, epoch {r.epoch}, plan {r.ticket}" for i, r in enumerate(reports)
           if (r.step, r.epoch, r.ticket) != mine]
    if bad or not reports:
        raise CheckFailed(f"ranks disagree: this one is at step {s.step}, epoch {s.epoch}, plan {s.ticket}; "
                          f"{'; '.join(bad) or 'nobody reported'}")


def _cool(s: State) -> State:
    return evolve(s, phase=Heat(s.step), local=Local())


def _heat(s: State) -> tuple[State, tuple[Effect, ...]]:
    assert isinstance(s.phase, Heat)
    if s.step - s.phase.since < s.cadence.heat_steps or not s.window.steps:
        return s, ()
    ticket = s.ticket + 1
    fresh = _window(s.window.layers, s.window.experts, s.window.end, s.cadence)
    ask = StartPlan(ticket, s.window, s.placement)
    return evolve(s, phase=Planning(s.step), ticket=ticket, window=fresh), (ask,)


def _planning(s: State, reports: tuple[Report, ...], abort: str) -> tuple[State, tuple[Effect, ...]]:
    assert isinstance(s.phase, Planning)
    plans = {r.plan for r in reports}
    why = abort
    if any(r.failed for r in reports):
        why = s.local.failed or "another rank's planner failed"
    elif 0 not in plans and len(plans) > 1:
        why = "ranks hold different plans"
    elif 0 in plans and s.step - s.phase.asked >= s.cadence.plan_steps:
        why = f"no plan on every rank after {s.step - s.phase.asked} steps"
    if why:
        return _cool(s), (StopPlan(s.ticket, why),)
    if 0 in plans:
        return s, ()
    plan = s.local.plan
    assert plan is not None
    if not plan.rounds:
        return _cool(s), ()
    ready = tuple(stages(plan.rounds, plan.commits))
    return _start(evolve(s, phase=Moving(plan, ready, 0, 0, s.step)))


def _start(s: State) -> tuple[State, tuple[Effect, ...]]:
    """Begin the rounds that share the next step; only called when all earlier ones have ended everywhere."""
    phase = s.phase
    assert isinstance(phase, Moving)
    plan, first = phase.plan, phase.started
    last = first
    while last < len(plan.rounds) and plan.starts[last] == plan.starts[first]:
        last += 1
    begin = tuple(StartRound(s.ticket, i, plan.rounds[i]) for i in range(first, last))
    return evolve(s, phase=phase._replace(started=last)), begin


def _moving(s: State, done: int, abort: str) -> tuple[State, tuple[Effect, ...]]:
    phase = s.phase
    assert isinstance(phase, Moving)
    effects: tuple[Effect, ...] = ()
    if done > phase.done:
        ready = tuple(t for group in phase.ready[phase.done:done] for t in group)
        if ready:
            s = evolve(s, placement=apply(s.placement, ready), epoch=s.epoch + 1)
            effects = (Commit(s.epoch, ready, s.placement),)
        phase = phase._replace(done=done, moved=s.step)
    elif not abort and s.step - phase.moved >= s.cadence.stall_steps:
        abort = f"no progress for {s.step - phase.moved} steps"
    if done == len(phase.plan.rounds):
        return _cool(s), effects
    if abort:
        s = evolve(s, phase=Draining(phase.started)) if phase.started > done else _cool(s)
        return s, (*effects, DropStaged(s.ticket, abort))
    s = evolve(s, phase=phase)
    if done == phase.started:
        s, begin = _start(s)
        return s, (*effects, *begin)
    return s, effects
