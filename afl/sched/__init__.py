"""The scheduler: a pure machine from events to plans.  Needs numpy only, never torch."""

from afl.sched import policies
from afl.sched.check import check
from afl.sched.config import SchedConfig
from afl.sched.events import (
    Aborted,
    Arrived,
    Event,
    Grammar,
    Input,
    Loaded,
    Paused,
    Peers,
    Ranked,
    Request,
    Reset,
    Resumed,
    Sampled,
    Sent,
    Tick,
    Timed,
)
from afl.sched.groups import GroupSpec
from afl.sched.log import EventLog, read, replay
from afl.sched.metrics import metrics
from afl.sched.outputs import REASONS, Outputs
from afl.sched.plan import Plan
from afl.sched.policy import Policy
from afl.sched.state import SchedState, init
from afl.sched.step import on_event, schedule, step, tokens_for

__all__ = [
    "REASONS", "Aborted", "Arrived", "Event", "EventLog", "Grammar", "GroupSpec", "Input", "Loaded", "Outputs",
    "Paused", "Peers", "Plan", "Policy", "Ranked", "Request", "Reset", "Resumed", "Sampled", "SchedConfig",
    "SchedState", "Sent", "Tick", "Timed", "check", "init", "metrics", "on_event", "policies", "read", "replay",
    "schedule", "step", "tokens_for",
]
