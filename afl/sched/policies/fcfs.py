"""First come, first served.  A preempted request goes to the front by itself: it arrived before all that wait.

long_prefill_token_threshold  cap on the prompt tokens of one request per step, 0 = none: long prompts are cut into
                              chunks so that the decodes beside them do not wait.
"""

import numpy as np

from afl.sched.policies.registry import register


def order(s, ticket, params):
    """Arrival order."""
    return (ticket.number,)


def victim(s, rows, params):
    """The newest: the least work is lost on the requests that waited longest."""
    return rows[-1]


def action(s, row, params):
    """Drop the blocks and compute them again."""
    return "recompute"


def chunk(s, start, left, granted, params):
    """At most `long_prefill_token_threshold` tokens."""
    cap = params["long_prefill_token_threshold"]
    return np.minimum(left, cap) if cap > 0 else left


register("fcfs", order=order, victim=victim, action=action, chunk=chunk, params={"long_prefill_token_threshold": 0})
