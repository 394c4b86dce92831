"""Earliest deadline first, and nobody is started who cannot make it while others can.

`Request.deadline` is when the first token is due.  A request whose prompt would end after its deadline, at the speed
of `prefill_tokens_per_s`, is hopeless: it goes behind those that still have a chance.  Requests without a deadline
come behind those with one, in order of arrival.

prefill_tokens_per_s  speed of prompts
"""

from afl.sched import notes
from afl.sched.policies.registry import register
from afl.sched.policy import Verdict

notes.TEXT["deadline"] = "it would be {a} s late, others behind it can still be in time"


def order(s, ticket, params):
    """(hopeless, deadline); hopeless as far as is known when it is queued."""
    r = ticket.request
    return (s.now + len(ticket.tokens) / params["prefill_tokens_per_s"] > r.deadline, r.deadline)


def admit(c, params):
    """Send a request that has become hopeless to the back, once."""
    r = c.ticket.request
    end = c.s.now + (len(c.ticket.tokens) - c.hit) / params["prefill_tokens_per_s"]
    hopeless, _ = c.ticket.entry[0]
    if end > r.deadline and not hopeless and c.s.queue.size > 1:
        return Verdict("deadline", end - r.deadline, 0.0, stop=False)


def rules(policy, params):
    """The gate reads the keys of the order."""
    return [] if policy.order == "deadline" else ["the gate 'deadline' needs the order 'deadline'"]


register("deadline", order=order, admit=admit, rules=rules, params={"prefill_tokens_per_s": 1e4},
         needs=("clock", "deadline"))
