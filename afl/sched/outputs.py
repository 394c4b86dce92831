"""The effect of events: tokens and finishes for the callers, as parallel arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

REASONS = ("", "stop", "length", "abort", "error", "repetition", "expired")
NONE, STOP, LENGTH, ABORT, ERROR, REPETITION, EXPIRED = range(7)


_NONE: Any = ()


def _array(dtype: Any) -> Callable[[Any], np.ndarray]:
    return lambda values: values if type(values) is np.ndarray else np.array(values, dtype)


@attrs.frozen(eq=False)
class Outputs:
    """One entry per delivered token or finish, in order of delivery; a finish without a token has token -1."""

    ids: np.ndarray = attrs.field(default=_NONE, converter=_array(object))
    tokens: np.ndarray = attrs.field(default=_NONE, converter=_array(np.int32))
    finish: np.ndarray = attrs.field(default=_NONE, converter=_array(np.int8))         # index into REASONS
    stop_reason: np.ndarray = attrs.field(default=_NONE, converter=_array(np.int32))   # the stop id, -1 = none
    refused: tuple[tuple[str, str], ...] = ()       # (id, message): never entered the queue
    dropped: int = 0                                # late results of finished rows
    step: int = 0                                   # the plan whose result this is; 0 = none

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self) -> list[tuple[str, int, str]]:
        """(id, token, finish reason) triples; for reading, not for the hot path."""
        return [(i, int(t), REASONS[f]) for i, t, f in zip(self.ids, self.tokens, self.finish, strict=True)]


NOTHING = Outputs()


def merge(parts: Sequence[Outputs]) -> Outputs:
    """All of `parts`, in order, as one."""
    parts = [p for p in parts if p is not NOTHING]
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    names = ("ids", "tokens", "finish", "stop_reason")
    return Outputs(
        *(np.concatenate([getattr(p, n) for p in parts]) for n in names),
        refused=tuple(r for p in parts for r in p.refused),
        dropped=sum(p.dropped for p in parts),
        step=max(p.step for p in parts),
    )
