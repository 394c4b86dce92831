"""What a step has sampled: tokens are appended and stop rules tried, whole columns at a time."""

import numpy as np

from afl.sched.events import Sampled
from afl.sched.loops import compiled, find_ends
from afl.sched.outputs import NONE, STOP, Outputs
from afl.sched.rows import end, sweep
from afl.sched.state import ENDED, SchedState, evolve


def observe(s: SchedState, e: Sampled) -> tuple[SchedState, Outputs]:
    """Take the tokens of step `e.step` into the state.

    Stop rules in order: below `min_tokens` only the length limits; EOS; stop ids; length.  Tokens of rows that ended
    meanwhile, and results of a step that is not in flight, are dropped and counted.
    """
    if not s.inflight or e.step < s.inflight[0].step:
        n = len(e.tokens)
        return evolve(s, dropped=s.dropped + n), Outputs(dropped=n, step=e.step)
    plan = s.inflight[0]
    assert e.step == plan.step, f"result of step {e.step} came before that of step {plan.step}"
    assert len(e.tokens) == len(plan.rows), (len(e.tokens), len(plan.rows))
    rows, ids, tokens, dropped = plan.at, plan.ids, e.tokens, 0
    keep = plan.emit
    if s.away:
        keep = keep & (s.status[rows] != ENDED)
        dropped = int(plan.emit.sum() - keep.sum())
    if np.count_nonzero(keep) < len(rows):
        rows, ids, tokens = rows[keep], ids[keep], tokens[keep]
    log = s.tokens.append(rows, tokens)
    finish, why = np.empty(len(rows), np.int8), np.full(len(rows), -1, np.int32)
    ended = compiled(find_ends)(rows, tokens, log.lengths, s.stops, s.floor, s.limit, finish)
    s = evolve(s, inflight=s.inflight[1:], tokens=log, dropped=s.dropped + dropped)
    if ended:
        for i in np.flatnonzero(finish == STOP):
            request = s.tickets[ids[i]].request
            if request.ignore_eos or tokens[i] not in request.eos_ids:
                why[i] = tokens[i]
        s = end(s, ids[finish != NONE])
    if s.away:
        s = sweep(s)
    return s, Outputs(ids, tokens, finish, why, dropped=dropped, step=plan.step)
