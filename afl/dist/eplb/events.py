"""The words of the machine: phases, events that tell it what happened, effects that tell others what to do."""

from typing import NamedTuple

import numpy as np

from afl.dist.eplb.values import LoadWindow, Placement, Plan, Round, Transfer

# ---- phases ---------------------------------------------------------------------------------------------------------


class Heat(NamedTuple):
    """Loads are collected until `since` + `Cadence.heat_steps`."""

    since: int


class Planning(NamedTuple):
    """A plan was asked for at a boundary; it is taken when every rank has the same one."""

    asked: int


class Moving(NamedTuple):
    """Rounds 0 ... started - 1 of a plan were started, rounds 0 ... done - 1 have ended on all ranks."""

    plan: Plan
    ready: tuple[tuple[Transfer, ...], ...]     # for each round what takes its slot after it
    started: int
    done: int
    moved: int                          # step of the last progress


class Draining(NamedTuple):
    """A move was given up; copies of its first `started` rounds may still be under way."""

    started: int


Phase = Heat | Planning | Moving | Draining

# ---- events and effects ---------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """This rank has a plan that was made for `ticket`."""

    ticket: int
    plan: Plan


class Failed(NamedTuple):
    """No plan will come for `ticket`: the planner died, refused, or took too long by somebody's clock."""

    ticket: int
    why: str


class RoundDone(NamedTuple):
    """All copies of a round that this rank sends or receives have ended."""

    ticket: int
    index: int


class Abort(NamedTuple):
    """Give up planning and moving: a link failed, or an operator says so."""

    why: str


class Report(NamedTuple):
    """What a rank tells the others at a boundary; a few integers beside the step's other metadata."""

    step: int
    epoch: int
    ticket: int
    plan: int                           # digest of the plan it has for the ticket, 0: none
    done: int                           # rounds of the ticket's plan that have ended here, in order
    failed: bool
    abort: bool


class Boundary(NamedTuple):
    """A step ended on all ranks.  `load`: int [layers, experts] or [steps, layers, experts], summed over ranks, or None
    if the counters were not read; `reports`: one per rank."""

    load: np.ndarray | None
    reports: tuple[Report, ...]


Event = Planned | Failed | RoundDone | Abort | Boundary


class StartPlan(NamedTuple):
    """Ask the planner; one rank's planner is enough if its plan is sent to all."""

    ticket: int
    window: LoadWindow
    placement: Placement


class StopPlan(NamedTuple):
    """The answer for `ticket` is of no use any more."""

    ticket: int
    why: str


class StartRound(NamedTuple):
    """Begin to copy experts into staging slots."""

    ticket: int
    index: int
    round: Round


class Commit(NamedTuple):
    """Before the next step: staged experts take their slots, and routing follows `placement`."""

    epoch: int
    transfers: tuple[Transfer, ...]
    placement: Placement


class DropStaged(NamedTuple):
    """What was staged for `ticket` is not wanted."""

    ticket: int
    why: str


Effect = StartPlan | StopPlan | StartRound | Commit | DropStaged
