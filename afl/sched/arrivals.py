"""Requests that come, that are given up, and that wait outside the queue for something of their own."""

from collections.abc import Sequence

import attrs
import numpy as np

from afl.sched.events import NEVER, Aborted, Arrived, Grammar, Input, Ranked, Request
from afl.sched.naming import named
from afl.sched.outputs import EXPIRED, NOTHING, REASONS, Outputs
from afl.sched.policy import bind
from afl.sched.queue import build, swept
from afl.sched.rows import end, enqueue, with_pins
from afl.sched.state import GRAMMAR, INPUT, QUEUED, SchedConfig, SchedState, Ticket, evolve, is_waiting


def arrive(s: SchedState, events: Sequence[Arrived]) -> tuple[SchedState, Outputs]:
    """Queue requests; one that can never run to its end is refused with the numbers.  Blocks are named here, once."""
    n, refused = s.arrivals, []
    for e in events:
        r = e.request
        why = f"request id {r.id!r} is in use" if r.id in s.tickets else refusal(s.config, r)
        if not why and r.id in s.pins:
            why = f"request id {r.id!r} is in use until the transfer of its blocks has ended"
        if why:
            refused.append((r.id, why))
            continue
        n += 1
        ticket = Ticket(r, n, r.prompt, *ends_of(s.config, r, len(r.prompt), r.max_tokens), priority=r.priority)
        ticket = named(s, ticket)
        s = evolve(s, arrivals=n)
        if r.expires < NEVER:
            s = evolve(s, alarms=s.alarms.push((r.expires, n, r.id)))
        if r.grammar:
            s = evolve(s, parked=(s.parked[0] + 1, s.parked[1]),
                       tickets=s.tickets.set(r.id, attrs.evolve(ticket, place=GRAMMAR)))
        else:
            s = enqueue(s, ticket)
    return s, Outputs(refused=tuple(refused)) if refused else NOTHING


def ends_of(c: SchedConfig, r: Request, tokens: int, most: int) -> tuple[int, int]:
    """(fewest total tokens at which a stop token ends a turn, total tokens that end it) after `tokens` of input."""
    limit = tokens + 1 if r.pooling else min(tokens + most, c.max_model_len)
    return tokens + r.min_tokens, limit


def refusal(c: SchedConfig, r: Request) -> str:
    """Why the request can never be served; empty if it can.

    >>> refusal(SchedConfig(4, 8, 16, 8, 4), Request("a", range(16), 1))
    'prompt of 16 tokens leaves no room for output: max_model_len is 16, so a prompt has at most 15'
    """
    n = len(r.prompt)
    if n == 0:
        return "prompt is empty; send at least one token"
    if r.max_tokens < 1 and not r.pooling:
        return f"max_tokens must be at least 1, got {r.max_tokens}"
    if r.repeat and not (len(r.repeat) == 3 and 1 <= r.repeat[0] <= r.repeat[1] and r.repeat[2] >= 2):
        return (f"repeat is {r.repeat}; give (shortest, longest, times) with 1 <= shortest <= longest and at least "
                f"2 times")
    return _too_long(c, n, ends_of(c, r, n, r.max_tokens)[1])


def _too_long(c: SchedConfig, n: int, total: int) -> str:
    if n >= c.max_model_len:
        return (f"prompt of {n} tokens leaves no room for output: max_model_len is {c.max_model_len}, "
                f"so a prompt has at most {c.max_model_len - 1}")
    need = sum(c.most(total - 1))                  # the last token is never computed
    if need > c.blocks:
        sizes = " and ".join(dict.fromkeys(f"{g.block_tokens}" for g in c.groups))
        return (f"prompt of {n} tokens with up to {total - n} outputs needs {need} blocks of {sizes} tokens, "
                f"the cache has {c.blocks}; shorten the prompt, lower max_tokens, or give the cache more blocks")
    return ""


def abort(s: SchedState, events: Sequence[Aborted]) -> tuple[SchedState, Outputs]:
    """End requests wherever they are; ids that are unknown or have finished are ignored."""
    live = {e.id: e for e in reversed(events) if e.id in s.tickets}
    if not live:
        return s, NOTHING
    return finish(s, {e.id: REASONS.index(e.reason) for e in reversed(live.values())})


def finish(s: SchedState, reasons: dict[str, int]) -> tuple[SchedState, Outputs]:
    """End requests without a token, each for its reason (index into REASONS)."""
    n = len(reasons)
    return end(s, reasons, forget=True), Outputs(list(reasons), [-1] * n, list(reasons.values()), [-1] * n)


def expire(s: SchedState) -> tuple[SchedState, Outputs]:
    """End the requests whose time is up, and the transfers whose readers never came."""
    due, alarms = {}, s.alarms
    while (entry := alarms.head()) and entry[0] <= s.now:
        ticket = s.tickets.get(entry[2])
        if ticket is not None and ticket.number == entry[1]:
            due[entry[2]] = EXPIRED
        alarms = alarms.pop()
    s = evolve(s, alarms=alarms)
    late = sorted(id for id, pins in s.pins.items() if pins[0].expires <= s.now) if len(s.pins) else ()
    for id in late:
        for pin in s.pins[id]:
            if pin.expires <= s.now:
                s = evolve(s, pool=s.pool.drop(pin.blocks[::-1]))
        s = with_pins(s, id, tuple(p for p in s.pins[id] if p.expires > s.now))
    return finish(s, due) if due else (s, NOTHING)


def grammar(s: SchedState, e: Grammar) -> tuple[SchedState, Outputs]:
    """Queue a request whose grammar is ready; end it with an error if that failed."""
    ticket = s.tickets.get(e.id)
    if ticket is None or (e.ok and ticket.place != GRAMMAR):
        return s, NOTHING
    if not e.ok:                                   # also when the grammar refuses a token that was sampled
        return finish(s, {e.id: REASONS.index("error")})
    return enqueue(evolve(s, parked=(s.parked[0] - 1, s.parked[1])), ticket), NOTHING


def feed(s: SchedState, e: Input) -> tuple[SchedState, Outputs]:
    """The next turn of a session: what it knows but its last token, and the new tokens."""
    ticket = s.tickets.get(e.id)
    if ticket is None or ticket.place != INPUT:
        why = "is unknown" if ticket is None else "is not waiting for input"
        return s, Outputs(refused=((e.id, f"session {e.id!r} {why}"),)) if ticket is None else NOTHING
    keep = ticket.tokens[: len(ticket.tokens) - (len(ticket.tokens) > len(ticket.request.prompt))]
    tokens = np.concatenate([keep, e.tokens]).astype(np.int32)
    floor, limit = ends_of(s.config, ticket.request, len(tokens), e.max_tokens)
    why = _too_long(s.config, len(tokens), limit)
    if e.max_tokens < 1:
        why = f"max_tokens must be at least 1, got {e.max_tokens}"
    if why:
        s, out = finish(s, {e.id: REASONS.index("length")})
        return s, attrs.evolve(out, refused=((e.id, why),))
    unit = s.config.unit
    ticket = named(s, attrs.evolve(
        ticket, tokens=tokens, floor=floor, limit=limit, chain=ticket.chain[: len(keep) // unit], preempts=0,
        computed=0))
    return enqueue(evolve(s, parked=(s.parked[0], s.parked[1] - 1)), ticket), NOTHING


def rank(s: SchedState, e: Ranked) -> SchedState:
    """Give a request another priority; its place in the queue changes with it."""
    ticket = s.tickets.get(e.id)
    if ticket is None or ticket.priority == e.priority:
        return s
    ticket = attrs.evolve(ticket, priority=e.priority)
    if ticket.place == QUEUED:
        s = enqueue(s, ticket)
        return evolve(s, queue=swept(s.queue, s.waiting, lambda entry: is_waiting(s, entry)))
    s = evolve(s, tickets=s.tickets.set(e.id, ticket))
    if ticket.row >= 0:
        priority = s.priority.copy()
        priority[ticket.row] = e.priority
        s = evolve(s, priority=priority)
    return s


def reorder(s: SchedState, policy) -> SchedState:
    """The same queue with the keys of another policy."""
    bound, entries, tickets = bind(policy), [], s.tickets
    for id, t in sorted(s.tickets.items()):
        if t.place == QUEUED:
            entry = (bound.order(s, t, bound.params), t.number, id)
            tickets = tickets.set(id, attrs.evolve(t, entry=entry))
            entries.append(entry)
    return evolve(s, tickets=tickets, queue=build(policy, entries))
