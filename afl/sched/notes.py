"""Why a request got nothing, waits, or lost its place: one columnar record per step, formatted on demand."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np

TEXT = {
    "limit": "all {b} tokens it may have are known or in flight",
    "host": "its grammar waits for its last token, {a} pending",
    "budget": "no tokens left in the step: it wants {a}, {b} are left",
    "fence": "its blocks come back with a plan in flight",
    "preempted": "gave up its {a} blocks, {b} tokens are to be computed again",
    "swapped": "its {a} blocks went to the host with {b} tokens",
    "rows": "all {a} rows are in use",
    "blocks": "it needs {a} blocks, {b} are neither held nor promised",
    "grammar": "its grammar is being compiled",
    "remote": "it waits for {a} tokens from elsewhere",
    "input": "the session waits for input",
    "paused": "the scheduler is paused",
    "chunk": "its chunk of {a} tokens came out empty, {b} tokens are left in the step",
    "select": "the policy keeps its turn for others",
    "cap": "the policy's cap on chunks leaves it nothing of {a} tokens",
    "preemption": "nobody is let in while a request is being preempted",
}
"""Rules of the mechanics; those of gates are written by their policy files.  {a}, {b}: the two numbers of a note."""


@attrs.frozen(eq=False)
class Notes:
    """(request, rule, two numbers) per decision, in order."""

    ids: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, Any, Any]]) -> "Notes":
        """From (id, rule, a, b) tuples."""
        rows = list(rows)
        return cls(*(tuple(c) for c in zip(*rows, strict=True))) if rows else NOTHING

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: "Notes") -> "Notes":
        if not other.ids or not self.ids:
            return self if self.ids else other
        return Notes(self.ids + other.ids, self.rules + other.rules, self.a + other.a, self.b + other.b)

    def lines(self) -> list[str]:
        """One sentence per note.

        >>> Notes.of([("r1", "blocks", 3, 2)]).lines()
        ['r1: it needs 3 blocks, 2 are neither held nor promised']
        """
        return [f"{i}: " + TEXT.get(rule, rule + " ({a}, {b})").format(a=_short(a), b=_short(b))
                for i, rule, a, b in zip(self.ids, self.rules, self.a, self.b, strict=True)]

    def count(self, counts: Mapping[str, int]) -> Mapping[str, int]:
        """`counts` with these notes added, by rule."""
        if not self.ids:
            return counts
        made = dict(counts)
        for rule in self.rules:
            made[rule] = made.get(rule, 0) + 1
        return made


def of_rows(ids: np.ndarray, why: np.ndarray, names: tuple[str, ...], a: np.ndarray, b: np.ndarray) -> Notes:
    """Notes of the rows with a reason code > 0; `names[code]` is the rule."""
    at = np.flatnonzero(why)
    rules = tuple(names[c] for c in why[at].tolist())
    return Notes(tuple(ids[at]), rules, tuple(a[at].tolist()), tuple(b[at].tolist()))


def _short(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


NOTHING = Notes()
