"""Shortest first with aging: a request counts as arrived later the more it has to compute.

Its key is arrival + seconds_per_token x tokens that the prefix cache does not have, so a request of n tokens is
overtaken only by those that arrive within seconds_per_token x n seconds after it: nothing starves, and nothing in the
queue has to be looked at again as time goes by.

seconds_per_token  0 = first come, first served; large = shortest first
"""

from afl.sched import hits
from afl.sched.policies.registry import register


def order(s, ticket, params):
    """(virtual arrival,)."""
    missing = len(ticket.tokens)
    if s.config.prefix_cache and ticket.chain:
        found = hits.longest(s.pool, s.config.groups, ticket.chain, s.config.unit, missing - 1, s.step)
        missing -= found.tokens
    return (ticket.request.arrival + params["seconds_per_token"] * missing,)


register("shortest", order=order, params={"seconds_per_token": 1e-3})
