"""Who leaves the queue: from its head, one row and the blocks of the whole known sequence each.

A request that lacks a row, tokens or blocks keeps everybody behind it waiting; one that a gate turns away for a reason
of its own only when the gate says so.  At most LOOK requests are looked past per step, so that a step's cost does not
grow with the queue.
"""

import attrs
import numpy as np

from afl.sched import hits
from afl.sched.groups import first_needed
from afl.sched.loops import compiled, empty32, extend, fit
from afl.sched.naming import name_rows, named
from afl.sched.notes import NOTHING, Notes
from afl.sched.plan import Copies, Load
from afl.sched.policy import Bound, Candidate
from afl.sched.rows import enqueue
from afl.sched.state import FREE, LOADING, ROW, RUNNING, SchedState, Ticket, evolve

LOOK = 64


@attrs.frozen(eq=False)
class Admitted:
    """What admission adds to a plan."""

    rows: tuple[int, ...] = ()
    grant: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    loads: tuple[Load, ...] = ()
    back: tuple[Copies, ...] = ()
    notes: Notes = NOTHING


def admit(s: SchedState, policy: Bound, budget: int, spare: int, granted: tuple) -> tuple[SchedState, Admitted]:
    """The state with requests moved into rows, their blocks taken, and what that adds to the plan `s.step`.

    Nobody is admitted while a preempted row waits for its fence: it goes first.
    """
    if s.preempting:
        return s, Admitted(notes=head_note(s, "fence"))
    free = np.flatnonzero(s.status == FREE).tolist()[::-1]
    rows, grant, start, loads, back, notes, past = [], [], [], [], [], [], []
    running = len(s.running)
    while entry := _head(s):
        s, ticket = entry
        id = ticket.request.id
        if not free:
            notes.append((id, "rows", s.config.max_seqs, 0))
            break
        ticket = named(s, ticket)
        hit = _hit(s, ticket)
        loading = _to_load(s, ticket, hit)
        promise, blocks = _cost(s, ticket, hit)
        done = hit.tokens or (ticket.computed if ticket.host else 0)
        left = len(ticket.tokens) - done
        n = 0 if loading else _chunk(s, policy, done, left, budget, granted)
        looked = Candidate(s, ticket, done, n, blocks, spare, running, granted)
        objection = next((v for gate in policy.admit if (v := gate(looked, policy.params)) is not None), None)
        if objection is not None:
            notes.append((id, objection.rule, objection.a, objection.b))
            if objection.stop or len(past) == LOOK:
                break
            past.append(ticket)
            s = evolve(s, queue=s.queue.pop())
            continue
        if n < 1 and not loading:
            notes.append((id, "budget" if budget < 1 else "chunk", min(left, budget), budget))
            break
        if blocks > spare:
            notes.append((id, "blocks", blocks, spare))
            break
        row = free.pop()
        s = evolve(s, queue=s.queue.pop())
        spare, running = spare - blocks, running + 1
        s, copies = _fill(s, row, ticket, hit, done, promise, loading)
        if loading:
            s = _reserve(s, row, loading)
            loads.append(Load(id, row, hit.tokens, loading, tuple(s.blocks_of(row))))
            continue
        first, n = int(s.sched[row]), _cut(s, row, n)
        s, _ = take_blocks(s, np.array([row]), [n])
        s = name_rows(s, np.array([row]))
        if copies is not None:
            back.append(copies)
        rows.append(row)
        grant.append(n)
        start.append(first)
        granted = (*granted, (first, n))
        budget -= n
    for ticket in past:                            # with a fresh key: the reason may change its place
        s = enqueue(s, ticket)
    return s, Admitted(tuple(rows), tuple(grant), tuple(start), tuple(loads), tuple(back), Notes.of(notes))


def take_blocks(s: SchedState, rows: np.ndarray, grant) -> tuple[SchedState, np.ndarray]:
    """Hand `grant` tokens to `rows`, with the blocks that they need; also where each grant starts, int32 [r]."""
    c, grant = s.config, np.asarray(grant, np.int32)
    sched, nblk, held, start = s.sched.copy(), s.nblk.copy(), s.held.copy(), empty32(len(rows))
    most = int((grant // int(c.sizes.min()) + 2).sum()) * len(c.groups)
    where, width = np.empty(most, np.intp), np.zeros(len(c.groups), np.int32)
    n, _ = compiled(extend)(rows, grant, c.max_seqs, c.width, c.sizes, c.codes, sched, nblk, held, start, where, width)
    table, pool = s.table, s.pool
    if n:
        ids, pool = pool.take(n)
        table = table.set(where[:n], ids)
    return evolve(s, sched=sched, nblk=nblk, held=held, table=table, pool=pool), start


def _head(s: SchedState) -> tuple[SchedState, Ticket] | None:
    """The state without dead entries at the head of its queue, and the first waiting request."""
    while entry := s.queue.head():
        ticket = s.tickets.get(entry[2])
        if ticket is not None and ticket.entry == entry:
            return s, ticket
        s = evolve(s, queue=s.queue.pop())
    return None


def head_note(s: SchedState, rule: str, beside: tuple[str, ...] = ()) -> Notes:
    """Why the first waiting request waits, unless it is one of `beside`."""
    found = _head(s)
    return Notes.of([(found[1].request.id, rule, 0, 0)]) if found and found[1].request.id not in beside else NOTHING


def _hit(s: SchedState, t: Ticket) -> hits.Hit:
    """What the prefix cache holds of a request; at least its last token is computed. Swapped content is none."""
    if not s.config.prefix_cache or t.host:
        return hits.Hit()
    return hits.longest(s.pool, s.config.groups, t.chain, s.config.unit, len(t.tokens) - 1, s.step)


def _to_load(s: SchedState, t: Ticket, hit: hits.Hit) -> int:
    """Leading tokens that are to come from elsewhere; 0 if the cache has as many."""
    remote = 0 if t.lost_remote else min(t.request.remote, len(t.tokens) - 1)
    return remote if remote > hit.tokens else 0


def _cost(s: SchedState, t: Ticket, hit: hits.Hit) -> tuple[tuple[int, ...], int]:
    """(blocks per group for the whole known sequence, how many of them come out of those now free)."""
    most = s.config.most(len(t.tokens))
    if not hit.tokens:
        return most, sum(most)
    entries = [-(-len(t.tokens) // g.block_tokens) for g in s.config.groups]
    promise = tuple(min(m, e - f) for m, e, f in zip(most, entries, hit.first, strict=True))
    refs = s.pool.part(2)
    return promise, sum(promise) - sum(int(np.count_nonzero(refs[list(b)])) for b in hit.blocks)


def _chunk(s: SchedState, policy: Bound, start: int, left: int, budget: int, granted: tuple) -> int:
    """The tokens a new row gets in this step."""
    n = np.array([min(left, budget)], np.int32)
    for cap in policy.chunk:
        n = np.minimum(n, cap(s, np.array([start], np.int32), np.array([left], np.int32), granted, policy.params))
    return int(n[0])


def _cut(s: SchedState, row: int, n: int) -> int:
    """The chunk of a new row, ended where a state is worth keeping."""
    c = s.config
    if not c.cut:
        return n
    grant, zero, flag = empty32(1), np.zeros(1, np.int32), np.zeros(1, bool)
    compiled(fit)(np.array([row]), np.array([n], np.int32), zero, s.sched, s.base, s.junction, s.base[row : row + 1],
                  c.max_seqs, c.sizes, c.codes, s.nblk, s.held, s.promise, c.cut, n, grant, zero, flag, zero)
    return int(grant[0])


def _reserve(s: SchedState, row: int, tokens: int) -> SchedState:
    """Take the blocks into which the first `tokens` tokens of a row are to be loaded."""
    nblk, held, where, w = s.nblk.copy(), s.held.copy(), [], s.config.width
    for spec, lane in zip(s.config.groups, s.lanes(row), strict=True):
        stop = -(-tokens // spec.block_tokens)
        places = range(lane * w + max(int(nblk[lane]), first_needed(spec, tokens)), lane * w + stop)
        where += places
        held[lane] += len(places)
        nblk[lane] = max(nblk[lane], stop)
    ids, pool = s.pool.take(len(where))
    return evolve(s, pool=pool, table=s.table.set(np.array(where, np.intp), ids), nblk=nblk, held=held)


def _fill(
    s: SchedState, row: int, t: Ticket, hit: hits.Hit, done: int, promise: tuple[int, ...], loading: int,
) -> tuple[SchedState, Copies | None]:
    """Write the columns that describe the request in `row`, with the blocks of its hit or of its stay in the host."""
    r, c, known = t.request, s.config, len(t.tokens)
    stops = [x for x in (*(() if r.ignore_eos else r.eos_ids), *r.stop_ids)]
    wide = s.stops
    if len(stops) > wide.shape[1]:
        wide = np.concatenate([wide, np.full((len(wide), len(stops) - wide.shape[1]), -1, np.int32)], 1)
    wide = wide.copy()
    wide[row] = -1
    wide[row, : len(stops)] = stops
    columns = dict(
        status=LOADING if loading else RUNNING, sched=done, hashed=hit.tokens // c.unit,
        junction=hit.junction // c.align * c.align if c.align else 0, fate=0,
        base=known, floor=t.floor, limit=t.limit, needs_host=r.needs_host, odd=bool(r.repeat) or r.pooling,
        preempts=t.preempts, number=t.number, priority=t.priority, arrival=r.arrival, ids=r.id, chain=t.chain)
    made = {name: getattr(s, name).copy() for name in columns}
    for name, value in columns.items():
        if name == "chain":
            made[name][row : row + 1] = [value]
        else:
            made[name][row] = value
    lanes = {name: getattr(s, name).copy() for name in ("nblk", "held", "first", "promise")}
    where, ids = [], []
    for g, (lane, spec) in enumerate(zip(s.lanes(row), c.groups, strict=True)):
        lanes["promise"][lane] = promise[g]
        if hit.tokens:
            lanes["nblk"][lane], lanes["first"][lane] = hit.tokens // spec.block_tokens, hit.first[g]
            lanes["held"][lane] = len(hit.blocks[g])
            where += range(lane * c.width + hit.first[g], lane * c.width + hit.first[g] + len(hit.blocks[g]))
            ids += hit.blocks[g]
    pool, hosts, copies = s.pool, s.hosts, None
    if ids:
        pool = pool.hold(ids)
    if t.host:
        taken, pool = pool.take(len(t.host))
        copies = Copies(taken, np.array([h for _, _, h in t.host], np.int32))
        hosts = hosts.drop(copies.host)
        where = [s.lanes(row)[g] * c.width + i for g, i, _ in t.host]
        ids = taken.tolist()
        for g, lane in enumerate(s.lanes(row)):
            mine = [i for h, i, _ in t.host if h == g]
            lanes["nblk"][lane] = -(-done // c.groups[g].block_tokens)
            lanes["held"][lane], lanes["first"][lane] = len(mine), min(mine, default=int(lanes["nblk"][lane]))
    table = s.table.set(np.array(where, np.intp), np.array(ids, np.int32)) if where else s.table
    running = s.running if loading else np.append(s.running, np.intp(row))
    ticket = attrs.evolve(t, row=row, place=ROW, entry=None, tokens=t.tokens[:0], host=())
    s = evolve(s, tickets=s.tickets.set(r.id, ticket), tokens=s.tokens.put(row, t.tokens), pool=pool, hosts=hosts,
               table=table, running=running, stops=wide, **made, **lanes)
    return _counted(s, t, hit, done), copies


def _counted(s: SchedState, t: Ticket, hit: hits.Hit, done: int) -> SchedState:
    """Counters of an admission: what a preempted request finds of its own is no hit of the prefix cache."""
    if t.preempts:
        return evolve(s, recomputed=s.recomputed + max(0, t.computed - done), refound=s.refound + hit.tokens)
    found = tuple(n + len(b) for n, b in zip(s.group_hits, hit.blocks, strict=True)) if hit.tokens else s.group_hits
    looked = len(t.tokens) if s.config.prefix_cache else 0
    return evolve(s, prompted=s.prompted + len(t.tokens), queried=s.queried + looked, hits=s.hits + hit.tokens,
                  group_hits=found)
