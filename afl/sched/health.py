"""Is the engine getting on?  A fold over (state, time) that turns red when work could run and none gets done.

States are immutable, so a thread of its own may ask while the engine's thread hangs in a step.
"""

import attrs

from afl.sched.standing import standing
from afl.sched.state import SchedState


@attrs.frozen
class Health:
    """ok, or for how many seconds nothing was done, the oldest request that could run, and what it waits for."""

    ok: bool
    idle: float = 0.0
    request: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.ok:
            return "ok"
        return f"no progress for {self.idle:.1f} s; the oldest request is {self.request}: {self.reason}"


@attrs.frozen
class Watch:
    """`limit`: seconds without progress that are too many.  Progress: a plan's result was seen, or a request ended.

    >>> from afl.sched import SchedConfig, init
    >>> s = init(SchedConfig(4, 8, 32, 8, 4))
    >>> str(Watch(10.0).see(s, 0.0).health(s, 100.0))
    'ok'
    """

    limit: float
    mark: tuple[int, int] = (0, 0)
    since: float = 0.0
    working: bool = False

    def see(self, s: SchedState, now: float) -> "Watch":
        """After a call of `step`."""
        mark = s.step - len(s.inflight), s.arrivals - len(s.tickets)
        working = bool(s.inflight) or s.pause != "keep" and bool(len(s.running) or not s.pause and s.waiting)
        if working == self.working and mark == self.mark and working:
            return self
        return Watch(self.limit, mark, now, working)

    def health(self, s: SchedState, now: float) -> Health:
        """At any time, of the newest state."""
        able = runnable(s)
        if not able or now - self.since < self.limit:
            return Health(True)
        id = min(able, key=lambda i: s.tickets[i].number)
        if s.inflight:
            oldest = s.inflight[0]
            return Health(False, now - self.since, id, f"the result of plan {oldest.step}, with "
                          f"{oldest.tokens} tokens of {len(oldest.rows)} requests, has not come")
        said = [line.partition(": ")[2] for line in s.notes.lines() if line.startswith(f"{id}: ")]
        return Health(False, now - self.since, id, said[0] if said else "the scheduler was not asked for a plan")


def runnable(s: SchedState) -> list[str]:
    """Requests that wait for nothing but the engine.

    Those that wait for a grammar, input, content from elsewhere or the end of a pause are not among them; all that
    has a plan in flight is.
    """
    if not s.busy:
        return []
    flying = {id for plan in s.inflight for id in plan.ids if id in s.tickets}
    away = set(standing(s).ids)
    return [id for id, _ in s.tickets.items() if id in flying or id not in away]
