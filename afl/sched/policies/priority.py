"""Importance first: the smallest `Request.priority` is admitted first and preempted last; ties go by arrival."""

import numpy as np

from afl.sched.policies.registry import register


def order(request, number, params):
    """(priority, arrival time)."""
    return (request.priority, request.arrival)


def victim(state, rows, params):
    """The least important; among equals the latest arrival."""
    return rows[np.lexsort((state.number[rows], state.arrival[rows], state.priority[rows]))[-1]]


register("priority", order=order, victim=victim)
