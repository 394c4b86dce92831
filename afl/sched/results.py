"""What a step has sampled: tokens are appended and stop rules tried, whole columns at a time."""

import attrs
import numpy as np

from afl.sched.events import Sampled
from afl.sched.outputs import LENGTH, NONE, STOP, Outputs
from afl.sched.rows import end, sweep
from afl.sched.state import ENDED, SchedState


def observe(s: SchedState, e: Sampled) -> tuple[SchedState, Outputs]:
    """Take the tokens of step `e.step` into the state.

    Stop rules in order: below `min_tokens` only the length limits; EOS; stop ids; length.  Tokens of rows that ended
    meanwhile, and results of a step that is not in flight, are dropped and counted.
    """
    if not s.inflight or e.step < s.inflight[0].step:
        n = len(e.tokens)
        return attrs.evolve(s, dropped=s.dropped + n), Outputs(dropped=n, step=e.step)
    plan = s.inflight[0]
    assert e.step == plan.step, f"result of step {e.step} came before that of step {plan.step}"
    assert len(e.tokens) == len(plan.rows), (len(e.tokens), len(plan.rows))
    rows, ids, tokens, dropped = plan.rows, plan.ids, e.tokens, 0
    keep = plan.emit
    if s.away:
        keep = keep & (s.status[rows] != ENDED)
        dropped = int(plan.emit.sum() - keep.sum())
    if not keep.all():
        rows, ids, tokens = rows[keep], ids[keep], tokens[keep]
    log = s.tokens.append(rows, tokens)
    total = log.lengths[rows]
    stop = (s.stops[rows] == tokens[:, None]).any(1)
    stop &= total >= s.floor[rows]
    ended = stop | (total >= s.limit[rows])
    s = attrs.evolve(s, inflight=s.inflight[1:], tokens=log, dropped=s.dropped + dropped)
    finish, why = np.zeros(len(rows), np.int8), np.full(len(rows), -1, np.int32)
    if ended.any():
        finish[:] = np.where(ended, np.where(stop, STOP, LENGTH), NONE)
        for i in np.flatnonzero(stop):
            request = s.tickets[ids[i]].request
            if request.ignore_eos or tokens[i] not in request.eos_ids:
                why[i] = tokens[i]
        s = end(s, ids[ended])
    if s.away:
        s = sweep(s)
    return s, Outputs(ids, tokens, finish, why, dropped=dropped, step=plan.step)
