"""The scheduler: a pure machine from events to plans.  Needs numpy only, never torch."""

from afl.sched import policies
from afl.sched.events import Aborted, Arrived, Event, Request, Sampled, Tick
from afl.sched.log import EventLog, read, replay
from afl.sched.outputs import REASONS, Outputs
from afl.sched.plan import Plan
from afl.sched.policy import Policy
from afl.sched.state import SchedConfig, SchedState, check, init
from afl.sched.step import on_event, schedule, step, tokens_for

__all__ = [
    "REASONS", "Aborted", "Arrived", "Event", "EventLog", "Outputs", "Plan", "Policy", "Request", "Sampled",
    "SchedConfig", "SchedState", "Tick", "check", "init", "on_event", "policies", "read", "replay", "schedule", "step",
    "tokens_for",
]
