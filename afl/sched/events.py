"""What can happen to the scheduler.  Time, tokens and measurements come in as events, so a log of them tells all."""

from typing import Any

import attrs
import numpy as np

NEVER = float("inf")


def _tokens(values: Any) -> np.ndarray:
    array = np.array(values, dtype=np.int32)       # a copy: the caller may reuse its buffer
    array.flags.writeable = False
    return array


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _items(values: Any) -> tuple[tuple[int, int, str], ...]:
    return tuple((int(a), int(b), str(c)) for a, b, c in values)


@attrs.frozen(eq=False)
class Request:
    """What one caller wants: a prompt and when to stop.  Times are seconds of the clock that `Tick` tells."""

    id: str
    prompt: np.ndarray = attrs.field(converter=_tokens)                       # int32 [tokens]
    max_tokens: int
    min_tokens: int = 0
    eos_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    stop_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = False
    repeat: tuple[int, ...] = attrs.field(default=(), converter=_ids)    # ends when a tail pattern of repeat[0] to
    #                                                  repeat[1] tokens has occurred repeat[2] times in a row
    pooling: bool = False         # ends, without a token, when its prompt has been computed
    needs_host: bool = False      # the next step depends on host state (a grammar): no decode before its last token
    grammar: bool = False         # waits for `Grammar` before it may run
    session: bool = False         # after a stop it waits for `Input` instead of being forgotten
    priority: int = 0             # smaller is more important
    arrival: float = 0.0
    deadline: float = NEVER       # when its first token is due; policies may use it
    expires: float = NEVER        # ends by itself, reason "expired"
    remote: int = 0               # leading tokens whose cache content is loaded from elsewhere
    readers: int = 0              # others that read its blocks after it has finished; each says `Sent`
    adapter: str = ""
    adapter_version: int = 0
    salt: str = ""                # prefixes are shared only among equal salts
    items: tuple[tuple[int, int, str], ...] = attrs.field(default=(), converter=_items)  # (first, tokens, content id)


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
    """The result of one plan: tokens per plan row, ignored where the plan's `emit` is False.

    With speculation tokens is [r, 1 + drafts] and count tells how many of each row are real: the accepted drafts and
    the one that was sampled behind them.
    """

    step: int
    tokens: np.ndarray = attrs.field(converter=_tokens)                       # int32 [r] or [r, 1 + drafts]
    count: np.ndarray | None = attrs.field(default=None, converter=attrs.converters.optional(_tokens))   # int32 [r]


@attrs.frozen
class Tick:
    """The clock says `now` (seconds)."""

    now: float


@attrs.frozen
class Paused:
    """Stop.  "abort" ends every request, "wait" lets those that run end, "keep" freezes all."""

    mode: str = "wait"


@attrs.frozen
class Resumed:
    """Go on after a pause."""


@attrs.frozen
class Reset:
    """What the cache holds is worth nothing for new requests: other weights, or memory that was given away."""

    weights: int | None = None    # the new weights version, None: the same weights


@attrs.frozen
class Grammar:
    """The grammar of a request was compiled, or could not be."""

    id: str
    ok: bool = True


@attrs.frozen(eq=False)
class Input:
    """The next input of a session; the token that ended the last turn is not part of it."""

    id: str
    tokens: np.ndarray = attrs.field(converter=_tokens)                       # int32 [tokens]
    max_tokens: int = 16


@attrs.frozen
class Loaded:
    """The blocks of a request that were to come from elsewhere hold `tokens` leading tokens; fewer after a failure."""

    id: str
    tokens: int
    failed: bool = False          # the rest of what was promised will not come: it is computed here


@attrs.frozen
class Sent:
    """One reader has the blocks of a finished request."""

    id: str
    reader: int = 0


@attrs.frozen
class Ranked:
    """A request's priority changed."""

    id: str
    priority: int


@attrs.frozen
class Timed:
    """A step took `ms`; features are those of `timing.features(plan)`."""

    step: int
    features: tuple[float, ...] = attrs.field(converter=lambda v: tuple(float(x) for x in v))
    ms: float


@attrs.frozen
class Peers:
    """What all data-parallel ranks told of themselves, this rank's number first; see policies/balance.py."""

    rank: int
    running: tuple[int, ...] = attrs.field(converter=_ids)                    # per rank
    waiting: tuple[int, ...] = attrs.field(converter=_ids)
    load: tuple[int, ...] = attrs.field(converter=_ids)                       # blocks held, per rank


Event = (Arrived | Aborted | Sampled | Tick | Paused | Resumed | Reset | Grammar | Input | Loaded | Sent | Ranked
         | Timed | Peers)
KINDS = (Arrived, Aborted, Sampled, Tick, Paused, Resumed, Reset, Grammar, Input, Loaded, Sent, Ranked, Timed, Peers)
