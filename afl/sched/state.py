"""The scheduler's state: numpy columns indexed by device row, and containers with versions.

A request holds a row from admission until no plan in flight mentions it; waiting requests are only tickets.  Columns
are copied and replaced, never written after publication.  What a plan in flight will yield ("pending" tokens) is not
stored: it is derived from `inflight`, so any pipeline depth is right.
"""

import hashlib
from typing import Any

import attrs
import numpy as np

from afl.errors import ConfigError
from afl.sched.events import Request
from afl.sched.loops import add_pending, compiled
from afl.sched.plan import Plan
from afl.sched.policy import Policy
from afl.sched.pool import BlockPool
from afl.sched.queue import Queue
from afl.versioned import TokenLog, VArray, VDict

FREE, RUNNING, LEAVING, ENDED = range(4)
"""Row status: nobody's; in `running`; preempted, its last tokens still in flight; finished, ditto (tokens dropped)."""

SKIPS = ("limit", "host", "budget", "fence", "preempted", "rows", "blocks")
"""Why a request got nothing in a step: all its output is in flight; its grammar waits for its last token; no tokens
left; blocks come back with a plan in flight; preempted; no row (head of the queue); no blocks (head of the queue)."""


@attrs.frozen
class SchedConfig:
    """Sizes that never change while a scheduler lives.  `blocks` counts usable blocks; block 0 is extra."""

    max_seqs: int
    max_step_tokens: int
    max_model_len: int
    blocks: int
    block_tokens: int

    def __attrs_post_init__(self) -> None:
        for f in attrs.fields(SchedConfig):
            if getattr(self, f.name) < 1:
                raise ConfigError(f"{f.name} must be at least 1, got {getattr(self, f.name)}")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-int(tokens) // self.block_tokens)


@attrs.frozen(eq=False)
class Ticket:
    """A request inside the scheduler, from arrival to finish."""

    request: Request
    number: int                   # arrival number, from 1
    tokens: np.ndarray            # int32, while it waits: prompt and the outputs of earlier runs
    row: int = -1                 # -1 = waiting
    preempts: int = 0


@attrs.frozen(eq=False, slots=False, repr=False)
class SchedState:
    """One moment of the scheduler.  n = max_seqs rows, w = blocks of the longest sequence."""

    config: SchedConfig
    now: float
    step: int                     # number of the newest plan
    arrivals: int                 # number of the newest request
    tickets: VDict                # id -> Ticket, every live request
    queue: Queue                  # those that wait
    running: np.ndarray           # intp rows in admission order
    away: tuple[tuple[int, int], ...]      # (fence, row): LEAVING and ENDED rows, free once plan `fence` was observed
    inflight: tuple[Plan, ...]    # handed out, result not yet seen; oldest first
    pool: BlockPool
    table: VArray                 # int32 [n, w] block tables, 0 behind the last block
    tokens: TokenLog              # what the host knows of each row: prompt and outputs
    # Change in every step.
    status: np.ndarray            # int8 [n]
    sched: np.ndarray             # int32 [n] tokens handed out for computing, those in flight included
    nblk: np.ndarray              # int32 [n] blocks held
    # Fixed while a request holds its row.
    ids: np.ndarray               # object [n]
    base: np.ndarray              # int32 [n] tokens known at admission
    promise: np.ndarray           # int32 [n] blocks set aside at admission: the whole sequence then known
    floor: np.ndarray             # int32 [n] fewest total tokens at which a stop token may end the row
    limit: np.ndarray             # int32 [n] total tokens that end the row
    stops: np.ndarray             # int32 [n, s] token ids that end the row, -1 = none
    needs_host: np.ndarray        # bool [n]
    preempts: np.ndarray          # int32 [n] times its request was preempted
    number: np.ndarray            # int64 [n] arrival number
    priority: np.ndarray          # int64 [n]
    arrival: np.ndarray           # float64 [n]
    # Counters since the start.
    dropped: int = 0              # late results of finished rows
    preemptions: int = 0
    recomputed: int = 0           # computed tokens given up by preemption
    skips: tuple[int, ...] = (0,) * len(SKIPS)

    @property
    def busy(self) -> bool:
        """Something is waiting, running or in flight."""
        return bool(len(self.tickets) or self.inflight)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        rows = len(self.running) + sum(self.status[row] == LEAVING for _, row in self.away)
        return len(self.tickets) - int(rows)

    def digest(self) -> str:
        """Hash of the whole meaning of this state; equal for equal histories."""
        return hashlib.sha256(repr(_content(self)).encode()).hexdigest()

    def frame(self) -> str:
        """The state as a text table."""
        from afl.sched.frame import frame

        return frame(self)

    def __repr__(self) -> str:
        return (f"SchedState(step {self.step}, running {len(self.running)}, waiting {self.waiting}, in flight "
                f"{len(self.inflight)}, free blocks {self.pool.free}/{self.pool.size})")


def init(config: SchedConfig, policy: Policy = Policy()) -> SchedState:  # noqa: B008  # a frozen value
    """The state before the first event; `policy` orders the queue until `schedule` says otherwise.

    >>> init(SchedConfig(4, 8, 32, 8, 4))
    SchedState(step 0, running 0, waiting 0, in flight 0, free blocks 8/8)
    """
    n = config.max_seqs
    int32, int64 = np.zeros(n, np.int32), np.zeros(n, np.int64)
    return SchedState(
        config=config, now=0.0, step=0, arrivals=0, tickets=VDict(), queue=Queue(policy),
        running=np.zeros(0, np.intp), away=(), inflight=(), pool=BlockPool.of(config.blocks), tokens=TokenLog(n),
        table=VArray(np.zeros((n, min(config.blocks, config.blocks_for(config.max_model_len))), np.int32)),
        status=np.zeros(n, np.int8), sched=int32, nblk=int32, ids=np.full(n, None, object), base=int32, promise=int32,
        floor=int32, limit=int32, stops=np.full((n, 1), -1, np.int32), needs_host=np.zeros(n, bool), preempts=int32,
        number=int64, priority=int64, arrival=np.zeros(n),
    )


def evolve(s: SchedState, **changes: Any) -> SchedState:
    """The state with some fields changed; twenty times faster than `attrs.evolve`, which reads every field."""
    assert changes.keys() <= s.__dict__.keys(), changes.keys()
    new = object.__new__(SchedState)
    new.__dict__.update(s.__dict__, **changes)
    return new


def pending(s: SchedState) -> np.ndarray:
    """Tokens of each row that plans in flight will yield, int32 [n]."""
    out = np.zeros(s.config.max_seqs, np.int32)
    for plan in s.inflight:
        compiled(add_pending)(plan.at, plan.emit, out)
    return out


def _content(s: SchedState) -> Any:
    rows = np.flatnonzero(s.status)
    columns = ("status", "sched", "nblk", "ids", "base", "promise", "floor", "limit", "needs_host", "preempts")
    live = [(e, s.tickets[e[2]].tokens.tolist()) for e in s.queue.entries() if is_waiting(s, e)]
    return (
        attrs.astuple(s.config), s.now, s.step, s.arrivals, sorted((k, t.row, t.number) for k, t in s.tickets.items()),
        live, s.running.tolist(), s.away, s.pool.ids().tolist(), s.table.array[rows].tolist(),
        [s.tokens[r].tolist() for r in rows], [getattr(s, c)[rows].tolist() for c in columns],
        [sorted(set(x) - {-1}) for x in s.stops[rows].tolist()],
        [(p.step, *(getattr(p, c).tolist() for c in ("rows", "ids", "start", "grant", "emit", "blocks")))
         for p in s.inflight],
        s.dropped, s.preemptions, s.recomputed, s.skips,
    )


def is_waiting(s: SchedState, entry: Any) -> bool:
    """Whether a queue entry still stands for a waiting request."""
    ticket = s.tickets.get(entry[2])
    return ticket is not None and ticket.number == entry[1] and ticket.row < 0


def check(s: SchedState) -> None:
    """Assert every invariant of a state (scheduler.md 1.12); for tests and debug mode."""
    c, rows = s.config, np.flatnonzero(s.status)
    away = {row for _, row in s.away}
    assert set(s.running) == set(np.flatnonzero(s.status == RUNNING)), "running rows and their status"
    assert away == set(np.flatnonzero(s.status >= LEAVING)) and len(s.away) == len(away), "rows away and their status"
    assert len(s.running) <= c.max_seqs                                                                 # S1
    assert len(np.unique(s.running)) == len(s.running)
    # S2, S3: what was handed out reaches at most the last known or pending token.
    pend, flying = pending(s), np.zeros(c.max_seqs, np.int64)
    for plan in s.inflight:
        assert plan.tokens <= c.max_step_tokens and (plan.grant >= 1).all()                             # S1
        assert (plan.kv_len <= c.max_model_len - 1).all(), "a position that no token may take"          # S11
        assert (s.status[plan.rows] != FREE).all(), "a row was freed while a plan in flight holds it"
        flying[plan.rows] += plan.grant
    live = rows[s.status[rows] != ENDED]           # an ended row's late tokens are dropped
    assert (s.sched[live] <= (s.tokens.lengths + pend)[live]).all() and (flying[rows] <= s.sched[rows]).all()
    # S4: every request is in one place.
    at = {t.row: id for id, t in s.tickets.items() if t.row >= 0}
    assert at == {int(r): s.ids[r] for r in rows if s.status[r] != ENDED}, "tickets and rows"
    queued = [e[2] for e in s.queue.entries() if is_waiting(s, e)]
    assert sorted(queued) == sorted(id for id, t in s.tickets.items() if t.row < 0), "tickets and queue"
    assert len(queued) == s.waiting
    # S10, K1: every block is free once, or held once.
    held = [s.table.array[r, : s.nblk[r]] for r in rows]
    assert sorted(np.concatenate([s.pool.ids(), *held]).tolist()) == list(range(1, c.blocks + 1)), "blocks"
    assert all((s.table.array[r, s.nblk[r]:] == 0).all() for r in range(c.max_seqs)), "table behind the last block"
    assert (s.nblk[live] * c.block_tokens >= s.sched[live]).all() and (s.nblk[s.status == FREE] == 0).all()
    owed = np.maximum(s.promise - s.nblk, 0)[s.running].sum()
    assert owed <= s.pool.free, f"{owed} blocks promised, {s.pool.free} free"
    # S11: a row past its limit would have ended.
    assert (s.tokens.lengths[live] < s.limit[live]).all() and (s.limit[rows] <= c.max_model_len).all()
