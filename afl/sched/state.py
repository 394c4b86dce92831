"""The scheduler's state: numpy columns indexed by device row, and containers with versions.

A request holds a row from admission until no plan in flight mentions it; waiting requests are only tickets.  Columns
are copied and replaced, never written after publication.  What a plan in flight will yield ("pending" tokens) is not
stored: it is derived from `inflight`, so any pipeline depth is right.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from afl.sched import notes as notes_
from afl.sched.config import SchedConfig
from afl.sched.events import Request
from afl.sched.loops import add_flying, add_pending, compiled
from afl.sched.notes import Notes
from afl.sched.plan import Copies, Load, Plan
from afl.sched.policy import Policy
from afl.sched.pool import BlockPool
from afl.sched.queue import Entry, Queue
from afl.versioned import TokenLog, VArray, VDict

FREE, RUNNING, LOADING, LEAVING, ENDED = range(5)
"""Row status: nobody's; in `running`; its blocks are being filled from elsewhere; preempted, its last tokens still in
flight; finished, ditto (tokens dropped)."""
STATUS = ("free", "running", "loading", "leaving", "ended")

QUEUED, ROW, GRAMMAR, INPUT = range(4)
"""Where a request is: in the queue; in a row; waiting for its grammar; a session that waits for input."""

SEALED = 1 << 30                  # in `hashed`: nothing of this row is to be found by others any more
PREEMPTED, SWAPPED = 1, 2         # in `fate`: what a leaving row's blocks become


@attrs.frozen(eq=False)
class Ticket:
    """A request inside the scheduler, from arrival to finish."""

    request: Request
    number: int                   # arrival number, from 1
    tokens: np.ndarray            # int32, while it has no row: prompt and the outputs of earlier runs
    floor: int                    # fewest total tokens at which a stop token may end it
    limit: int                    # total tokens that end it
    place: int = QUEUED
    entry: Entry | None = None    # its entry in the queue; any other entry of it is dead
    row: int = -1
    preempts: int = 0
    computed: int = 0             # tokens that had been computed when it was preempted
    priority: int = 0
    chain: tuple[bytes, ...] = ()                  # names of its full blocks
    weights: int = 0              # version of the weights that the names belong to
    host: tuple[tuple[int, int, int], ...] = ()    # (group, index, host block) of its content after a swap
    lost_remote: bool = False     # what was promised from elsewhere is not to be had again


@attrs.frozen(eq=False)
class Pin:
    """Blocks of a request that is gone, kept for a transfer."""

    blocks: np.ndarray            # int32, a holder each
    readers: int                  # who must still say `Sent`; 0: an incoming transfer, ended by `Loaded`
    seen: frozenset[int] = frozenset()
    expires: float = float("inf")


@attrs.frozen(eq=False, slots=False, repr=False)
class SchedState:
    """One moment of the scheduler.  n = max_seqs rows, G cache groups, w = blocks of the longest sequence."""

    config: SchedConfig
    now: float
    step: int                     # number of the newest plan
    arrivals: int                 # number of the newest request
    pause: str                    # "", "wait", "keep"
    weights: int                  # version of the weights
    tickets: VDict                # id -> Ticket, every live request
    queue: Queue                  # those that wait
    parked: tuple[int, int]       # requests that wait for their grammar, sessions that wait for input
    alarms: Queue                 # (expires, number, id) of requests that expire
    pins: VDict                   # id -> Pins, oldest first
    learned: Mapping[str, Any]    # per policy file: what it has made of the events so far
    running: np.ndarray           # intp rows in admission order
    away: tuple[tuple[int, int], ...]      # (fence, row): LEAVING and ENDED rows, free once plan `fence` was observed
    inflight: tuple[Plan, ...]    # handed out, result not yet seen; oldest first
    pool: BlockPool
    hosts: BlockPool              # blocks in host memory
    outgoing: tuple[Copies, ...]  # copies to the host that the next plan carries
    table: VArray                 # int32 [G * n * w] block tables, lane after lane; 0 where no block is held
    tokens: TokenLog              # what the host knows of each row: prompt and outputs
    # Change in every step.
    status: np.ndarray            # int8 [n]
    sched: np.ndarray             # int32 [n] tokens handed out, those in flight included, drafts as if accepted
    nblk: np.ndarray              # int32 [G * n] entries of the block table in use
    held: np.ndarray              # int32 [G * n] those that are not 0
    # Change now and then.
    first: np.ndarray             # int32 [G * n] entries before it are given back
    hashed: np.ndarray            # int32 [n] blocks of `unit` tokens that got their names
    chain: np.ndarray             # object [n] names of the row's full blocks
    fate: np.ndarray              # int8 [n] of leaving rows
    # Fixed while a request holds its row.
    ids: np.ndarray               # object [n]
    base: np.ndarray              # int32 [n] tokens known at admission
    promise: np.ndarray           # int32 [G * n] blocks set aside until `base` tokens are computed
    junction: np.ndarray          # int32 [n] where a state is worth keeping, 0 = nowhere
    floor: np.ndarray             # int32 [n] fewest total tokens at which a stop token may end the row
    limit: np.ndarray             # int32 [n] total tokens that end the row
    stops: np.ndarray             # int32 [n, s] token ids that end the row, -1 = none
    needs_host: np.ndarray        # bool [n]
    odd: np.ndarray               # bool [n] ends by rules that are tried one by one: repetition, pooling
    preempts: np.ndarray          # int32 [n] times its request was preempted
    number: np.ndarray            # int64 [n] arrival number
    priority: np.ndarray          # int64 [n]
    arrival: np.ndarray           # float64 [n]
    # Of the last call of `schedule`, and counters since the start.
    loads: tuple[Load, ...] = ()
    notes: Notes = notes_.NOTHING
    counts: Mapping[str, int] = attrs.field(factory=dict)          # notes by rule
    dropped: int = 0              # late results of finished rows
    preemptions: int = 0
    swaps: int = 0
    recomputed: int = 0           # tokens computed again after a preemption
    refound: int = 0              # tokens of preempted requests that the prefix cache still had
    queried: int = 0              # prompt tokens looked up in the prefix cache, first admissions only
    hits: int = 0                 # those found
    group_hits: tuple[int, ...] = ()               # blocks found, per group
    prompted: int = 0             # prompt tokens of first admissions
    loaded: int = 0               # tokens whose cache content came from elsewhere
    drafted: int = 0              # draft tokens tried
    accepted: int = 0             # and accepted

    @property
    def busy(self) -> bool:
        """Something is waiting, running or in flight."""
        return bool(len(self.tickets) or self.inflight)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        rows = len(self.running) + sum(self.status[row] == LEAVING for _, row in self.away) + self.loading
        return len(self.tickets) - int(rows) - sum(self.parked)

    @property
    def loading(self) -> int:
        """Rows that wait for cache content from elsewhere."""
        return int(np.count_nonzero(self.status == LOADING))

    @property
    def preempting(self) -> bool:
        """A preempted row still has a plan in flight."""
        return any(self.status[row] == LEAVING for _, row in self.away)

    def lanes(self, row: int) -> list[int]:
        """The row's place in columns per group."""
        return [g * self.config.max_seqs + int(row) for g in range(len(self.config.groups))]

    def blocks_of(self, row: int) -> list[np.ndarray]:
        """Per group the row's block table, int32 [blocks], 0 where none is held; copies."""
        table, w = self.table.array, self.config.width
        return [table[lane * w : lane * w + self.nblk[lane]].copy() for lane in self.lanes(row)]

    def digest(self) -> str:
        """Hash of the whole meaning of this state; equal for equal histories."""
        return hashlib.sha256(repr(_content(self)).encode()).hexdigest()

    def frame(self) -> str:
        """The state as a text table."""
        from afl.sched.frame import frame

        return frame(self)

    def explain(self) -> list[str]:
        """Why requests got nothing in the last step, and what those wait for that no step looks at; a sentence each."""
        from afl.sched.standing import standing

        return (self.notes + standing(self)).lines()

    def __repr__(self) -> str:
        return (f"SchedState(step {self.step}, running {len(self.running)}, waiting {self.waiting}, in flight "
                f"{len(self.inflight)}, free blocks {self.pool.free}/{self.pool.size})")


def init(config: SchedConfig, policy: Policy = Policy()) -> SchedState:  # noqa: B008  # a frozen value
    """The state before the first event; `policy` orders the queue until `schedule` says otherwise.

    >>> init(SchedConfig(4, 8, 32, 8, 4))
    SchedState(step 0, running 0, waiting 0, in flight 0, free blocks 8/8)
    """
    n, lanes = config.max_seqs, config.max_seqs * len(config.groups)
    int32, int64, wide = np.zeros(n, np.int32), np.zeros(n, np.int64), np.zeros(lanes, np.int32)
    return SchedState(
        config=config, now=0.0, step=0, arrivals=0, pause="", weights=0, tickets=VDict(), queue=Queue(policy),
        parked=(0, 0), alarms=Queue(policy), pins=VDict(), learned={}, running=np.zeros(0, np.intp), away=(),
        inflight=(), pool=BlockPool.of(config.blocks), hosts=BlockPool.of(config.host_blocks), outgoing=(),
        tokens=TokenLog(n), table=VArray(np.zeros(lanes * config.width, np.int32)), status=np.zeros(n, np.int8),
        sched=int32, nblk=wide, held=wide, first=wide, hashed=int32, chain=np.full(n, None, object),
        fate=np.zeros(n, np.int8), ids=np.full(n, None, object), base=int32, promise=wide, junction=int32, floor=int32,
        limit=int32, stops=np.full((n, 1), -1, np.int32), needs_host=np.zeros(n, bool), odd=np.zeros(n, bool),
        preempts=int32, number=int64, priority=int64, arrival=np.zeros(n), group_hits=(0,) * len(config.groups),
    )


def evolve(s: SchedState, **changes: Any) -> SchedState:
    """The state with some fields changed; twenty times faster than `attrs.evolve`, which reads every field."""
    assert changes.keys() <= s.__dict__.keys(), changes.keys()
    new = object.__new__(SchedState)
    new.__dict__.update(s.__dict__, **changes)
    return new


def pending(s: SchedState) -> np.ndarray:
    """The most tokens that plans in flight can yield, per row: int32 [n]."""
    out = np.zeros(s.config.max_seqs, np.int32)
    for plan in s.inflight:
        compiled(add_pending)(plan.at, plan.emit, plan.drafts, out)
    return out


def flying(s: SchedState) -> np.ndarray:
    """Tokens of each row in plans in flight: int32 [n]."""
    out = np.zeros(s.config.max_seqs, np.int32)
    for plan in s.inflight:
        compiled(add_flying)(plan.at, plan.grant, out)
    return out


def is_waiting(s: SchedState, entry: Entry) -> bool:
    """Whether a queue entry still stands for a waiting request."""
    ticket = s.tickets.get(entry[2])
    return ticket is not None and ticket.entry == entry


def _content(s: SchedState) -> Any:
    rows: Any = np.flatnonzero(s.status)
    lanes = [lane for r in rows for lane in s.lanes(r)]
    columns = ("status", "sched", "ids", "base", "junction", "floor", "limit", "needs_host", "odd", "preempts",
               "hashed", "chain", "fate", "number", "priority", "arrival")
    tickets = sorted((k, t.row, t.number, t.place, t.entry, t.floor, t.limit, t.preempts, t.computed, t.priority,
                      t.tokens.tolist(), t.chain, t.weights, t.host, t.lost_remote) for k, t in s.tickets.items())
    pool = [(p.ids(), p.links.array[2 * p.size + 2 :].tolist(), p.names.array.tolist(), sorted(p.blocks.items()),
             p.free, p.evictions) for p in (s.pool, s.hosts)]
    names = ("rows", "ids", "start", "grant", "emit", "drafts")
    return (
        s.config, s.now, s.step, s.arrivals, s.pause, s.weights, tickets, s.parked,
        [e for e in s.queue.entries() if is_waiting(s, e)],
        [e for e in s.alarms.entries() if e[2] in s.tickets and s.tickets[e[2]].number == e[1]],
        sorted((k, p.blocks.tolist(), p.readers, sorted(p.seen), p.expires) for k, x in s.pins.items() for p in x),
        sorted(s.learned.items()), s.running.tolist(), s.away, pool,
        [(c.device.tolist(), c.host.tolist()) for c in s.outgoing],
        [x.tolist() for r in rows for x in s.blocks_of(r)], [s.tokens[r].tolist() for r in rows],
        [getattr(s, c)[rows].tolist() for c in columns],
        [getattr(s, c)[lanes].tolist() for c in ("nblk", "held", "first", "promise")],
        [sorted(set(x) - {-1}) for x in s.stops[rows].tolist()],
        [(p.step, *(getattr(p, c).tolist() for c in names), [b.tolist() for b in p.blocks]) for p in s.inflight],
        attrs.astuple(s.notes), sorted(s.counts.items()),
        [getattr(s, c) for c in ("dropped", "preemptions", "swaps", "recomputed", "refound", "queried", "hits",
                                 "group_hits", "prompted", "loaded", "drafted", "accepted")],
    )
