"""Rows that stop running, and when their row and blocks are free again.

A plan in flight may still write into the blocks of a row that has ended or was preempted, and its result still names
the row.  So such a row is `away` until every plan that holds it was observed (its fence).  A preempted row keeps
taking its late tokens meanwhile and then goes back to the queue; an ended row's late tokens are dropped.
"""

from collections.abc import Iterable

import attrs
import numpy as np

from afl.sched.queue import swept
from afl.sched.state import ENDED, FREE, LEAVING, RUNNING, SchedState, evolve, is_waiting


def leave(s: SchedState, rows: Iterable[int], status: int) -> SchedState:
    """Take `rows` out of `running` with a new status; those that no plan in flight holds are freed at once."""
    column, away = s.status.copy(), s.away
    for row in map(int, rows):
        if column[row] == RUNNING:
            away += ((fence_of(s, row), row),)
        column[row] = status
    running = s.running[column[s.running] == RUNNING]
    return sweep(evolve(s, status=column, running=running, away=away))


def fence_of(s: SchedState, row: int) -> int:
    """Number of the newest plan in flight that holds `row`, 0 if there is none."""
    return next((p.step for p in reversed(s.inflight) if (p.rows == row).any()), 0)


def sweep(s: SchedState) -> SchedState:
    """Free the rows away whose fence was passed; the preempted among them wait again."""
    oldest = s.inflight[0].step if s.inflight else s.step + 1
    due = [row for fence, row in s.away if fence < oldest]
    if not due:
        return s
    rows = np.array(due)
    tickets, queue, again = s.tickets, s.queue, rows[s.status[rows] == LEAVING]
    for row in again:
        ticket = tickets[s.ids[row]]
        tickets = tickets.set(s.ids[row], attrs.evolve(
            ticket, row=-1, tokens=s.tokens[row].copy(), preempts=ticket.preempts + 1))
        queue = queue.push(ticket.request, ticket.number)
    table = s.table.array
    blocks = np.concatenate([table[row, : s.nblk[row]][::-1] for row in rows])     # tail first: the head is reused last
    status, nblk, ids = s.status.copy(), s.nblk.copy(), s.ids.copy()
    status[rows], nblk[rows], ids[rows] = FREE, 0, None
    width = int(s.nblk[rows].max())
    return evolve(
        s, recomputed=s.recomputed + int(s.sched[again].sum()), tickets=tickets, queue=queue, status=status,
        nblk=nblk, ids=ids, pool=s.pool.give(blocks),
        table=s.table.set(np.ix_(rows, np.arange(width)), 0), tokens=s.tokens.clear(rows),
        away=tuple(a for a in s.away if a[0] >= oldest))


def preempt(s: SchedState, rows: Iterable[int]) -> SchedState:
    """Drop the computed tokens of `rows` and queue their requests again with all tokens known so far."""
    rows = list(rows)
    return leave(evolve(s, preemptions=s.preemptions + len(rows)), rows, LEAVING)


def end(s: SchedState, ids: Iterable[str]) -> SchedState:
    """Forget requests that have finished, wherever they are."""
    tickets, rows = s.tickets, []
    for id in ids:
        row = tickets[id].row
        tickets = tickets.delete(id)
        if row >= 0:
            rows.append(row)
    s = leave(evolve(s, tickets=tickets), rows, ENDED)
    return evolve(s, queue=swept(s.queue, s.waiting, lambda e: is_waiting(s, e)))
