"""The error family: what was wrong, where, got and expected, and the next thing to do.

Every error that a user can cause derives from `AflError`; the command line prints its text and exits
with `exit_status`, never with a traceback.
"""

import difflib
from collections.abc import Iterable


class AflError(Exception):
    """Base of every error with a message for the user."""

    exit_status = 1


class BadInput(AflError):
    """A request, flag or file that cannot be served as given; nothing was started."""

    exit_status = 2


class ConfigError(BadInput):
    """An option, or a combination of options, that does not hold."""


class CheckpointError(BadInput):
    """A checkpoint that is missing, corrupt, incomplete, or of an unknown kind."""


class RequestError(BadInput):
    """A generation request that is refused at submission."""


class BalanceError(BadInput):
    """Loads, a placement, a topology or parameters from which no placement of experts can be planned."""


class TypeRuleError(AflError):
    """Operands that do not fit an op's declared types."""


class NoKernel(AflError):
    """No kernel of an op accepts these operands on this chip."""


class VendorRefusal(AflError):
    """Arguments that a vendor operator does not take; raised by its emulation on CPU."""


class AmbiguousKernel(AflError):
    """Two kernels accept the same operands and nothing orders them."""


class TraceError(AflError):
    """A traced value used in a way that a pure-tensor program cannot express."""


class GraphError(AflError):
    """A graph that breaks an invariant of the IR."""


class CaptureError(AflError):
    """A program that cannot be captured in a device graph, or a graph that was used against its contract."""


class RetraceError(AflError):
    """Strict mode: a program would have been traced after warm-up."""


class UseAfterDonation(AflError):
    """A tree was read after it had been given to a donating call."""


class CheckFailed(AflError):
    """Checked mode: an index out of range, a non-finite value, or a result that is not of its declared type."""


_LONGEST = 200      # characters of a name that are looked at


def nearest(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """The names in `known` that look like `name`, best first.

    >>> nearest("temprature", ["temperature", "top_p"])
    ['temperature']
    """
    spelt = {k.lower(): k for k in known}
    return [spelt[k] for k in difflib.get_close_matches(name[:_LONGEST].lower(), list(spelt), n=n, cutoff=0.5)]


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Text for an unknown name: the nearest ones, then all of them.

    >>> unknown("chip", "cpux", ["cpu"])
    "unknown chip 'cpux'; did you mean 'cpu'? Known: cpu"
    """
    known = sorted(known)
    name = name if len(name) <= _LONGEST else name[:_LONGEST] + "..."     # it may come from a hostile file
    near = nearest(name, known)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(known) or 'none'}"


def violations(title: str, found: Iterable[str]) -> str:
    """One message that lists all violations at once."""
    rows = list(found)
    return rows[0] if len(rows) == 1 else "\n".join([f"{title}: {len(rows)} problems", *(f"  - {r}" for r in rows)])
