"""Waits that last: told when asked for, so that no step has to look at those who wait."""

from afl.sched.notes import Notes
from afl.sched.state import GRAMMAR, INPUT, LOADING, QUEUED, ROW, SchedState


def standing(s: SchedState) -> Notes:
    """A note for each request that waits for its grammar, its input or content from elsewhere, or for a pause's end."""
    found = []
    for id, ticket in sorted(s.tickets.items(), key=lambda pair: pair[1].number):
        if ticket.place == GRAMMAR:
            found.append((id, "grammar", 0, 0))
        elif ticket.place == INPUT:
            found.append((id, "input", 0, 0))
        elif ticket.place == ROW and s.status[ticket.row] == LOADING:
            found.append((id, "remote", ticket.request.remote, 0))
        elif s.pause == "keep" or s.pause and ticket.place == QUEUED:
            found.append((id, "paused", 0, 0))
    return Notes.of(found)
