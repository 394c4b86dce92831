"""What a step has sampled: tokens are appended and stop rules tried, whole columns at a time."""

import numpy as np

from afl.sched.events import Loaded, Sampled
from afl.sched.loops import compiled, empty32, find_ends, find_past
from afl.sched.naming import name_rows
from afl.sched.outputs import NONE, NOTHING, REPETITION, STOP, Outputs
from afl.sched.rows import end, sweep, unpin
from afl.sched.state import ENDED, LOADING, RUNNING, SchedState, evolve, flying


def observe(s: SchedState, e: Sampled) -> tuple[SchedState, Outputs]:
    """Take the tokens of step `e.step` into the state.

    Stop rules in order, for each token: below `min_tokens` only the length limits; EOS; stop ids; length; repetition.
    Tokens behind a stop, tokens of rows that ended meanwhile, and results of a step that is not in flight are dropped.
    """
    if not s.inflight or e.step < s.inflight[0].step:
        n = len(e.tokens)
        return evolve(s, dropped=s.dropped + n), Outputs(dropped=n, step=e.step)
    plan = s.inflight[0]
    assert e.step == plan.step, f"result of step {e.step} came before that of step {plan.step}"
    assert len(e.tokens) == len(plan.rows), (len(e.tokens), len(plan.rows))
    rows, ids, dropped = plan.at, plan.ids, 0
    tokens = e.tokens if e.tokens.ndim == 2 else e.tokens[:, None]
    count = np.ones(len(rows), np.int32) if e.count is None else e.count
    s = evolve(s, inflight=s.inflight[1:])
    if e.count is not None:
        s = _reject(s, plan, count)
    keep = plan.emit
    if s.away:
        keep = keep & (s.status[rows] != ENDED)
        dropped = int(plan.emit.sum() - keep.sum())
    if np.count_nonzero(keep) < len(rows):
        rows, ids, tokens, count = rows[keep], ids[keep], tokens[keep], count[keep]
    finish, taken = np.empty(len(rows), np.int8), empty32(len(rows))
    ended = compiled(find_ends)(rows, tokens, count, s.tokens.lengths, s.stops, s.floor, s.limit, taken, finish)
    if np.count_nonzero(s.odd[rows]):
        ended = _odd_ends(s, rows, tokens, taken, finish)
    log = s.tokens
    for k in range(tokens.shape[1]):
        if k == 0 and tokens.shape[1] == 1 and taken.all():
            log = log.append(rows, tokens[:, 0])
        elif (more := taken > k).any():
            log = log.append(rows[more], tokens[more, k])
    s = evolve(s, tokens=log, dropped=s.dropped + dropped)
    outputs = _outputs(s, ids, tokens, taken, finish, plan.step, dropped)
    if ended:
        s = end(s, ids[finish != NONE])
    if s.away:
        s = sweep(s)
    if s.config.sliding:
        s = _give_back(s, plan.at)
    return s, outputs


def _reject(s: SchedState, plan, count: np.ndarray) -> SchedState:
    """Take the drafts that were not accepted out of what was handed out."""
    lost = np.where(plan.emit, plan.drafts - (count - 1), 0)
    assert (lost >= 0).all(), f"more tokens than drafts in the result of step {plan.step}"
    sched = s.sched.copy()
    sched[plan.at] -= lost
    tried = int(plan.drafts.sum())
    return evolve(s, sched=sched, drafted=s.drafted + tried, accepted=s.accepted + tried - int(lost.sum()))


def _outputs(s: SchedState, ids, tokens, taken, finish, step: int, dropped: int) -> Outputs:
    """The columnar effect; rows with several tokens take several entries, the finish stands at the last."""
    if tokens.shape[1] == 1:
        flat, code, owner = tokens[:, 0], finish, ids
        if not taken.all():
            flat = np.where(taken > 0, flat, -1)                            # a pooled result is no token
    else:
        real = np.arange(tokens.shape[1]) < taken[:, None]
        flat, owner = tokens[real], np.repeat(ids, taken)
        code = np.zeros(len(flat), np.int8)
        code[np.cumsum(taken)[taken > 0] - 1] = finish[taken > 0]
        if (taken == 0).any():
            at = np.flatnonzero(taken == 0)
            flat, code = np.append(flat, np.full(len(at), -1)), np.append(code, finish[at])
            owner = np.append(owner, ids[at])
    why = np.full(len(flat), -1, np.int32)
    for i in np.flatnonzero(code == STOP):
        request = s.tickets[owner[i]].request
        if flat[i] >= 0 and (request.ignore_eos or flat[i] not in request.eos_ids):
            why[i] = flat[i]
    return Outputs(owner, flat.astype(np.int32, copy=False), code, why, dropped=dropped, step=step)


def _odd_ends(s: SchedState, rows, tokens, taken, finish) -> int:
    """Stop rules that few requests have: repetition of a tail pattern, and pooling.  Returns how many rows end."""
    for i in np.flatnonzero(s.odd[rows]).tolist():
        row = rows[i]
        request = s.tickets[s.ids[row]].request
        if request.pooling:
            taken[i], finish[i] = 0, STOP
            continue
        history = s.tokens[row].tolist()
        prompt = int(s.floor[row]) - request.min_tokens
        for k in range(int(taken[i])):
            history.append(int(tokens[i, k]))
            last = k + 1 == taken[i] and finish[i] != NONE
            if not last and len(history) >= s.floor[row] and repeats(history[prompt:], *request.repeat):
                taken[i], finish[i] = k + 1, REPETITION
                break
    return int(np.count_nonzero(finish))


def repeats(tokens: list[int], shortest: int, longest: int, times: int) -> bool:
    """Whether the tokens end in `times` copies of one pattern of `shortest` to `longest` tokens.

    >>> repeats([9, 1, 2, 1, 2], 1, 3, 2), repeats([1, 2, 1], 1, 3, 2)
    (True, False)
    """
    return any(
        len(tokens) >= n * times and all(tokens[-1 - i] == tokens[-1 - i - n] for i in range(n * (times - 1)))
        for n in range(shortest, longest + 1))


def _give_back(s: SchedState, rows: np.ndarray) -> SchedState:
    """Free the blocks that no step in flight and no later one can read: those behind a window, and old states."""
    rows = rows[s.status[rows] == RUNNING]
    done = (s.sched - flying(s))[rows]
    c, first, held = s.config, s.first.copy(), s.held.copy()
    where = np.empty(int(s.held.sum()), np.intp)
    n = compiled(find_past)(rows, done, c.max_seqs, c.width, c.sizes, c.codes, c.windows, first, s.nblk, held,
                            s.table.array, where)
    if not n:
        return s
    s = name_rows(s, rows)
    places = where[:n]
    ids = s.table.array[places]
    return evolve(s, first=first, held=held, pool=s.pool.drop(ids[::-1]), table=s.table.set(places, 0))


def loaded(s: SchedState, e: Loaded) -> tuple[SchedState, Outputs]:
    """The content that a request waited for has come, all or some of it; a late notice is ignored.

    After a failure what is missing is computed here: groups that give blocks back need the whole prefix for that, so
    with them nothing of a partial delivery is used.
    """
    ticket = s.tickets.get(e.id)
    if ticket is None or ticket.row < 0 or s.status[ticket.row] != LOADING:
        return unpin(s, e.id, None), NOTHING
    row, c = ticket.row, s.config
    local, promised = int(s.sched[row]), min(ticket.request.remote, int(s.tokens.lengths[row]) - 1)
    tokens = min(e.tokens, promised)
    if tokens < promised:
        tokens = local if c.sliding else max(local, tokens // c.unit * c.unit)
        s = _truncate(s, row, tokens)
    status, sched = s.status.copy(), s.sched.copy()
    status[row], sched[row] = RUNNING, tokens
    s = evolve(s, status=status, sched=sched, running=np.append(s.running, np.intp(row)),
               loaded=s.loaded + max(0, tokens - local))
    return name_rows(s, np.array([row])), NOTHING


def _truncate(s: SchedState, row: int, tokens: int) -> SchedState:
    """Free the blocks of a row behind its first `tokens` tokens."""
    nblk, held, where, w = s.nblk.copy(), s.held.copy(), [], s.config.width
    table = s.table.array
    for spec, lane in zip(s.config.groups, s.lanes(row), strict=True):
        keep = -(-tokens // spec.block_tokens)
        gone = [lane * w + i for i in range(keep, int(nblk[lane])) if table[lane * w + i]]
        held[lane] -= len(gone)
        nblk[lane] = min(nblk[lane], keep)
        where += gone
    if not where:
        return evolve(s, nblk=nblk)
    places = np.array(where, np.intp)
    ids = table[places]
    return evolve(s, nblk=nblk, held=held, pool=s.pool.drop(ids[::-1]), table=s.table.set(places, 0))
