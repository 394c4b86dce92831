"""A log seen as a timeline, under its own policy or under another one.

Under its own policy the log's events are applied as they are.  Under another one the results of the log belong to
plans that it would not make; so requests, aborts and the rest come at the steps at which they came, and each plan is
answered with the tokens that its requests have in the log, as many plans in flight as there were.  Where a request
would go on beyond what the log knows of it (it was given up, or the log was cut), the other timeline ends.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from afl.sched.config import SchedConfig
from afl.sched.events import Arrived, Event, Sampled, Timed
from afl.sched.notes import Notes
from afl.sched.outputs import Outputs
from afl.sched.plan import Plan
from afl.sched.policy import Policy
from afl.sched.state import SchedState, init
from afl.sched.step import step


@attrs.frozen(eq=False)
class Turn:
    """One call of `step`."""

    plan: Plan | None
    outputs: Outputs
    notes: Notes
    running: int
    waiting: int
    free: int
    ms: float = 1.0               # what the plan took, if the log says so


@attrs.frozen(eq=False)
class Timeline:
    """What happened, call by call, and the state at the end; `end`: why it ends there, if not with the log."""

    turns: tuple[Turn, ...]
    state: SchedState
    end: str = ""

    def first(self) -> dict[str, int]:
        """Number of the call that delivered each request's first token."""
        found: dict[str, int] = {}
        for i, t in enumerate(self.turns, 1):
            for id in t.outputs.ids[t.outputs.tokens >= 0]:
                found.setdefault(id, i)
        return found

    def finished(self) -> dict[str, int]:
        """Number of the call that ended each request."""
        return {id: i for i, t in enumerate(self.turns, 1) for id in t.outputs.ids[t.outputs.finish > 0]}


def follow(config: SchedConfig, policy: Policy, batches: Iterable[list[Event]], until: int | None = None) -> Timeline:
    """The timeline of a log's events under the policy that made them; `until`: calls to follow."""
    s, turns, times = init(config, policy), [], {}
    for i, events in enumerate(batches):
        if until is not None and i >= until:
            break
        times |= {e.step: e.ms for e in events if isinstance(e, Timed)}
        s = _turn(s, events, policy, turns)
    return Timeline(tuple(attrs.evolve(t, ms=times.get(t.plan.step, 1.0)) if t.plan else t for t in turns), s)


def another(
    config: SchedConfig, policy: Policy, batches: Iterable[list[Event]], said: Timeline, until: int | None = None
) -> Timeline:
    """The timeline of the same requests under another policy; `said`: the log's own timeline, all of it.

    until: calls to follow; None: to the end of all requests.
    """
    tokens: dict[str, list[int]] = {}
    ends: dict[str, bool] = {}                      # requests that ended by a rule of their own in the log
    for t in said.turns:
        for id, token, why in t.outputs.rows():
            if token >= 0:
                tokens.setdefault(id, []).append(token)
            if why:
                ends[id] = why in ("stop", "length", "repetition")
    s, turns, flight, prompts = init(config, policy), [], deque(), {}
    for events in itertools.islice(batches, until):
        prompts |= {e.request.id: len(e.request.prompt) for e in events if isinstance(e, Arrived)}
        mine: list[Event] = [e for e in events if not isinstance(e, Sampled | Timed)]
        if any(isinstance(e, Sampled) for e in events) and flight:
            mine.append(flight.popleft())
        s = _turn(s, mine, policy, turns)
        end = _answer(s, turns[-1].plan, tokens, ends, prompts, flight)
        if end:
            return Timeline(tuple(turns), s, end)
    while s.busy and flight and until is None:
        s = _turn(s, [flight.popleft()], policy, turns)
        end = _answer(s, turns[-1].plan, tokens, ends, prompts, flight)
        if end:
            return Timeline(tuple(turns), s, end)
    return Timeline(tuple(turns), s)


def _turn(s: SchedState, events: Sequence[Event], policy: Policy, turns: list[Turn]) -> SchedState:
    s, plan, out = step(s, events, policy)
    turns.append(Turn(plan, out, s.notes, len(s.running), s.waiting, s.pool.free))
    return s


def _answer(s: SchedState, plan: Plan | None, tokens: dict, ends: dict[str, bool],
            prompts: dict[str, int], flight: deque) -> str:
    """Put the result of a plan into `flight`: each row's next token in the log; draft tokens are all rejected.

    Returns why there is none: a request's next token is not in the log, although it has not ended there.
    """
    if plan is None or not len(plan.rows):
        return ""
    out = np.zeros((len(plan.rows), 1 + s.config.drafts), np.int32)
    for i, (id, row) in enumerate(zip(plan.ids, plan.at, strict=True)):
        ahead = sum(int(p.emit[p.at == row].sum()) for p in s.inflight[:-1])
        at = int(s.tokens.lengths[row]) + ahead - prompts[id]
        known = tokens.get(id, [])
        if plan.emit[i] and at >= len(known) and not ends.get(id):
            return f"the log does not say how request {id} goes on after {len(known)} tokens"
        out[i, 0] = known[at] if 0 <= at < len(known) else 0       # 0: a plan that was made before the end was known
    flight.append(Sampled(plan.step, out if s.config.drafts else out[:, 0],
                          np.ones(len(out), np.int32) if s.config.drafts else None))
    return ""


def first_difference(a: Timeline, b: Timeline) -> tuple[int, str, str] | None:
    """The first call whose plans differ, and both plans as text."""
    for i, (x, y) in enumerate(zip(a.turns, b.turns, strict=False), 1):
        if repr(x.plan) != repr(y.plan):
            return i, repr(x.plan), repr(y.plan)
    return None
