"""Requests that come and requests that are given up."""

from collections.abc import Sequence

from afl.sched.events import Aborted, Arrived, Request
from afl.sched.outputs import NOTHING, REASONS, Outputs
from afl.sched.rows import end
from afl.sched.state import SchedConfig, SchedState, Ticket, evolve


def arrive(s: SchedState, events: Sequence[Arrived]) -> tuple[SchedState, Outputs]:
    """Queue requests; one that can never run to its end is refused with the numbers."""
    tickets, queue, n, refused = s.tickets, s.queue, s.arrivals, []
    for e in events:
        r = e.request
        why = f"request id {r.id!r} is in use" if r.id in tickets else refusal(s.config, r)
        if why:
            refused.append((r.id, why))
            continue
        n += 1
        tickets = tickets.set(r.id, Ticket(r, n, r.prompt))
        queue = queue.push(r, n)
    s = evolve(s, tickets=tickets, queue=queue, arrivals=n)
    return s, Outputs(refused=tuple(refused)) if refused else NOTHING


def limit_of(c: SchedConfig, r: Request) -> int:
    """Total tokens at which a request ends."""
    return min(len(r.prompt) + r.max_tokens, c.max_model_len)


def refusal(c: SchedConfig, r: Request) -> str:
    """Why the request can never be served; empty if it can.

    >>> refusal(SchedConfig(4, 8, 16, 8, 4), Request("a", range(16), 1))
    'prompt of 16 tokens leaves no room for output: max_model_len is 16, so a prompt has at most 15'
    """
    n = len(r.prompt)
    if n == 0:
        return "prompt is empty; send at least one token"
    if r.max_tokens < 1:
        return f"max_tokens must be at least 1, got {r.max_tokens}"
    if n >= c.max_model_len:
        return (f"prompt of {n} tokens leaves no room for output: max_model_len is {c.max_model_len}, "
                f"so a prompt has at most {c.max_model_len - 1}")
    total = limit_of(c, r)
    need = c.blocks_for(total - 1)                 # the last token is never computed
    if need > c.blocks:
        return (f"prompt of {n} tokens with up to {total - n} outputs needs {need} blocks of {c.block_tokens} tokens, "
                f"the cache has {c.blocks}; shorten the prompt, lower max_tokens, or give the cache more blocks")
    return ""


def abort(s: SchedState, events: Sequence[Aborted]) -> tuple[SchedState, Outputs]:
    """End requests wherever they are; ids that are unknown or have finished are ignored."""
    live = {e.id: e for e in reversed(events) if e.id in s.tickets}
    if not live:
        return s, NOTHING
    ended = list(reversed(live.values()))
    n = len(ended)
    outputs = Outputs([e.id for e in ended], [-1] * n, [REASONS.index(e.reason) for e in ended], [-1] * n)
    return end(s, live), outputs
