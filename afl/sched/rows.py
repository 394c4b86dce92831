"""Rows that stop running, and when their row and blocks are free again.

A plan in flight may still write into the blocks of a row that has ended or was preempted, and its result still names
the row.  So such a row is `away` until every plan that holds it was observed (its fence).  A preempted row keeps
taking its late tokens meanwhile and then goes back to the queue; an ended row's late tokens are dropped.  Blocks under
a transfer outlive the row: they are pinned until the transfer has ended.
"""

from collections.abc import Collection, Iterable, Mapping

import attrs
import numpy as np

from afl.sched.naming import name_rows, named
from afl.sched.plan import Copies
from afl.sched.policy import bind
from afl.sched.queue import swept
from afl.sched.state import (
    ENDED,
    FREE,
    GRAMMAR,
    INPUT,
    LEAVING,
    LOADING,
    QUEUED,
    RUNNING,
    SEALED,
    SWAPPED,
    Pin,
    SchedState,
    Ticket,
    evolve,
    is_waiting,
)


def enqueue(s: SchedState, t: Ticket) -> SchedState:
    """The state with a request in the queue, where the policy places it."""
    bound, id = bind(s.queue.policy), t.request.id
    t = attrs.evolve(t, place=QUEUED, row=-1)
    entry = (bound.order(s, t, bound.params), t.number, id)
    return evolve(s, tickets=s.tickets.set(id, attrs.evolve(t, entry=entry)), queue=s.queue.push(entry))


def leave(s: SchedState, rows: Iterable[int], status: int) -> SchedState:
    """Take `rows` out of `running` with a new status; those that no plan in flight holds are freed at once."""
    column, away = s.status.copy(), s.away
    for row in map(int, rows):
        if column[row] in (RUNNING, LOADING):
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
    rows = np.array(due, np.intp)
    s = name_rows(s, rows)
    blocks = np.concatenate([b for row in due for b in held_blocks(s, row)])
    for row in rows[s.status[rows] == LEAVING].tolist():
        s = _requeue(s, row)
    n, w = s.config.max_seqs, s.config.width
    lanes = (np.arange(len(s.config.groups))[:, None] * n + rows).ravel()
    width = int(s.nblk[lanes].max())
    places = (lanes[:, None] * w + np.arange(width)).ravel()
    columns = {c: getattr(s, c).copy() for c in ("status", "ids", "chain", "fate", "nblk", "held", "first", "promise")}
    columns["status"][rows], columns["ids"][rows], columns["chain"][rows], columns["fate"][rows] = FREE, None, None, 0
    for c in ("nblk", "held", "first", "promise"):
        columns[c][lanes] = 0
    return evolve(
        s, pool=s.pool.drop(blocks), table=s.table.set(places, 0), tokens=s.tokens.clear(rows),
        away=tuple(a for a in s.away if a[0] >= oldest), **columns)


def held_blocks(s: SchedState, row: int) -> list[np.ndarray]:
    """Per group the blocks of a row, last one first: the head of a prefix is to be reused last."""
    return [b[b > 0][::-1] for b in s.blocks_of(row)]


def preempt(s: SchedState, fates: Mapping[int, int]) -> SchedState:
    """Take rows out and queue their requests again with all tokens known so far; fates: row -> PREEMPTED or SWAPPED."""
    fate = s.fate.copy()
    for row, value in fates.items():
        fate[row] = value
    return leave(evolve(s, preemptions=s.preemptions + len(fates), fate=fate), fates, LEAVING)


def end(s: SchedState, ids: Iterable[str], forget: bool = False) -> SchedState:
    """Requests that have finished, wherever they are.  A session waits for input unless it is to be forgotten."""
    rows, sessions = [], []
    for id in ids:
        ticket = s.tickets[id]
        if ticket.row >= 0:
            rows.append(ticket.row)
            s = _keep_for_transfers(s, ticket)
        if ticket.place == GRAMMAR:
            s = evolve(s, parked=(s.parked[0] - 1, s.parked[1]))
        if ticket.place == INPUT:
            s = evolve(s, parked=(s.parked[0], s.parked[1] - 1))
        if ticket.request.session and not forget:
            sessions.append((id, ticket))
        else:
            if ticket.row >= 0:
                s = name_rows(s, np.array([ticket.row]))
            s = evolve(s, tickets=s.tickets.delete(id), hosts=_without(s.hosts, ticket.host))
    for id, ticket in sessions:
        s = name_rows(s, np.array([ticket.row]))
        chain = s.chain[ticket.row] if s.hashed[ticket.row] < SEALED else ()
        ticket = attrs.evolve(ticket, place=INPUT, row=-1, tokens=s.tokens[ticket.row].copy(), entry=None,
                              chain=chain, weights=s.weights if chain else -1)
        s = evolve(s, tickets=s.tickets.set(id, ticket), parked=(s.parked[0], s.parked[1] + 1))
    s = leave(s, rows, ENDED)
    alarms = swept(s.alarms, len(s.tickets), lambda e: e[2] in s.tickets and s.tickets[e[2]].number == e[1])
    return evolve(s, alarms=alarms, queue=swept(s.queue, s.waiting, lambda e: is_waiting(s, e)))


def unpin(s: SchedState, id: str, reader: int | None) -> SchedState:
    """A transfer of a request that is gone has ended (reader None), or one reader has its blocks.

    A session pins the blocks of each of its turns; a reader takes them in order.
    """
    pins = s.pins.get(id) or ()
    for i, pin in enumerate(pins):
        if (reader is None) != (pin.readers == 0) or reader in pin.seen:
            continue
        seen = pin.seen if reader is None else pin.seen | {reader}
        if reader is not None and len(seen) < pin.readers:
            return with_pins(s, id, (*pins[:i], attrs.evolve(pin, seen=seen), *pins[i + 1 :]))
        return with_pins(evolve(s, pool=s.pool.drop(pin.blocks)), id, pins[:i] + pins[i + 1 :])
    return s


def with_pins(s: SchedState, id: str, pins: tuple[Pin, ...]) -> SchedState:
    """The state with these pins of a request, oldest first."""
    return evolve(s, pins=s.pins.set(id, pins) if pins else s.pins.delete(id))


def _keep_for_transfers(s: SchedState, t: Ticket) -> SchedState:
    """Pin the blocks of a request that ends while others read or fill them."""
    filling = s.status[t.row] == LOADING
    if not filling and not t.request.readers:
        return s
    blocks = np.concatenate(held_blocks(s, t.row))
    expires = float("inf") if filling else s.now + s.config.read_timeout
    pin = Pin(blocks, 0 if filling else t.request.readers, expires=expires)
    s = evolve(s, pool=s.pool.hold(blocks))
    return with_pins(s, t.request.id, (*(s.pins.get(t.request.id) or ()), pin))


def _requeue(s: SchedState, row: int) -> SchedState:
    """Queue the request of a preempted row that no plan holds any more; a swapped one takes its content along."""
    id = s.ids[row]
    ticket: Ticket = s.tickets[id]
    known, done = s.tokens[row].copy(), min(int(s.sched[row]), int(s.tokens.lengths[row]))
    host: tuple[tuple[int, int, int], ...] = ()
    if s.fate[row] == SWAPPED and done:
        places = [(g, i, int(blocks[i])) for g, blocks in enumerate(s.blocks_of(row))
                  for i in range(-(-done // s.config.groups[g].block_tokens)) if blocks[i]]
        if len(places) <= s.hosts.free:
            ids, hosts = s.hosts.take(len(places))
            copies = Copies(np.array([p[2] for p in places], np.int32), ids)
            host = tuple((g, i, h) for (g, i, _), h in zip(places, ids.tolist(), strict=True))
            s = evolve(s, hosts=hosts, outgoing=(*s.outgoing, copies), swaps=s.swaps + 1)
    chain = s.chain[row] if s.hashed[row] < SEALED else ()
    ticket = attrs.evolve(
        ticket, tokens=known, preempts=ticket.preempts + 1, computed=done, host=host, lost_remote=True,
        chain=chain or (), weights=s.weights if chain else -1)
    return enqueue(s, named(s, ticket))


def _without(hosts, host: Collection[tuple[int, int, int]]):
    return hosts.drop(np.array([h for _, _, h in host], np.int32)) if host else hosts
