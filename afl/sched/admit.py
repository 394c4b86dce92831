"""Who leaves the queue: strictly from its head, one row and the blocks of the whole known sequence each."""

import attrs
import numpy as np

from afl.sched.arrivals import limit_of
from afl.sched.policy import Bound
from afl.sched.state import FREE, LEAVING, RUNNING, SchedState, evolve

COLUMNS = ("status", "sched", "ids", "base", "promise", "floor", "limit", "stops", "needs_host", "preempts", "number",
           "priority", "arrival")


def admit(s: SchedState, policy: Bound, budget: int, spare: int) -> tuple[SchedState, list[int], list[int], str]:
    """The state with requests moved into rows, those rows, their grants, and why the next one was not admitted.

    Nobody is admitted while a preempted row waits for its fence: it goes first.
    """
    if not s.queue.size:
        return s, [], [], ""
    if any(s.status[row] == LEAVING for _, row in s.away):
        return s, [], [], "fence"
    queue, tickets, tokens = s.queue, s.tickets, s.tokens
    free = np.flatnonzero(s.status == FREE).tolist()
    rows, grants, why = [], [], ""
    columns = None
    while entry := queue.head():
        ticket = tickets.get(entry[2])
        if ticket is None or ticket.number != entry[1]:
            queue = queue.pop()                            # aborted while it waited
            continue
        blocks = s.config.blocks_for(len(ticket.tokens))
        n = int(policy.chunk(s, np.array([min(len(ticket.tokens), budget)], np.int32), policy.params)[0])
        why = "budget" if n < 1 else "rows" if not free else "blocks" if blocks > spare else ""
        if why:
            break
        columns = columns or {name: getattr(s, name).copy() for name in COLUMNS}
        row = free.pop(0)
        _fill(columns, row, ticket, s, blocks)
        tickets = tickets.set(entry[2], attrs.evolve(ticket, row=row, tokens=ticket.tokens[:0]))
        tokens = tokens.put(row, ticket.tokens)
        queue, budget, spare = queue.pop(), budget - n, spare - blocks
        rows.append(row)
        grants.append(n)
    if columns:
        running = np.concatenate([s.running, np.array(rows, np.intp)])
        s = evolve(s, tickets=tickets, tokens=tokens, running=running, **columns)
    return evolve(s, queue=queue), rows, grants, why


def _fill(columns: dict[str, np.ndarray], row: int, ticket, s: SchedState, blocks: int) -> None:
    """Write the columns that describe the request in `row`."""
    r = ticket.request
    stops = [t for t in (*(() if r.ignore_eos else r.eos_ids), *r.stop_ids)]
    wide = columns["stops"]
    if len(stops) > wide.shape[1]:
        more = np.full((len(wide), len(stops) - wide.shape[1]), -1, np.int32)
        columns["stops"] = wide = np.concatenate([wide, more], 1)
    wide[row] = -1
    wide[row, : len(stops)] = stops
    values = dict(
        status=RUNNING, sched=0, ids=r.id, base=len(ticket.tokens), promise=blocks,
        floor=len(r.prompt) + r.min_tokens, limit=limit_of(s.config, r), needs_host=r.needs_host,
        preempts=ticket.preempts, number=ticket.number, priority=r.priority, arrival=r.arrival)
    for name, value in values.items():
        columns[name][row] = value
