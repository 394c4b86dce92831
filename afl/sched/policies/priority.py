"""Importance first: the smallest `Request.priority` is admitted first and preempted last; ties go by arrival."""

import numpy as np

from afl.sched.policies.registry import register


def order(s, ticket, params):
    """(priority, arrival time)."""
    return (ticket.priority, ticket.request.arrival)


def victim(s, rows, params):
    """The least important; among equals the latest arrival."""
    return rows[np.lexsort((s.number[rows], s.arrival[rows], s.priority[rows]))[-1]]


register("priority", order=order, victim=victim, needs=("priority",))
