"""What can happen to the scheduler.  Time and sampled tokens come in as events, so a log of them is a full account."""

from typing import Any

import attrs
import numpy as np


def _tokens(values: Any) -> np.ndarray:
    array = np.array(values, dtype=np.int32)       # a copy: the caller may reuse its buffer
    array.flags.writeable = False
    return array


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


@attrs.frozen(eq=False)
class Request:
    """What one caller wants: a prompt and when to stop."""

    id: str
    prompt: np.ndarray = attrs.field(converter=_tokens)                       # int32 [tokens]
    max_tokens: int
    min_tokens: int = 0
    eos_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    stop_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = False
    needs_host: bool = False      # the next step depends on host state (a grammar): no decode before its last token
    priority: int = 0             # smaller is more important
    arrival: float = 0.0


@attrs.frozen(eq=False)
class Arrived:
    """A request was submitted."""

    request: Request


@attrs.frozen
class Aborted:
    """A caller gave up; an unknown id is ignored."""

    id: str
    reason: str = "abort"         # a member of outputs.REASONS: a stop string found by the front end says "stop"


@attrs.frozen(eq=False)
class Sampled:
    """The result of one plan: a token per plan row, ignored where the plan's `emit` is False."""

    step: int
    tokens: np.ndarray = attrs.field(converter=_tokens)                       # int32 [rows of the plan]


@attrs.frozen
class Tick:
    """The clock says `now` (seconds)."""

    now: float


Event = Arrived | Aborted | Sampled | Tick
