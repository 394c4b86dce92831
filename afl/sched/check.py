"""Every invariant of a state, for tests and debug mode.  S and K numbers are those of the scheduler's specification."""

import numpy as np

from afl.sched.grants import owed_to
from afl.sched.groups import unneeded
from afl.sched.state import (
    ENDED,
    FREE,
    GRAMMAR,
    INPUT,
    LEAVING,
    LOADING,
    QUEUED,
    ROW,
    RUNNING,
    SchedState,
    flying,
    is_waiting,
    pending,
)


def check(s: SchedState) -> None:
    """Assert that the state is sound."""
    _rows(s)
    _requests(s)
    _blocks(s)
    _pool(s.pool, [*_held(s), *(p.blocks for pins in s.pins.values() for p in pins)])
    _pool(s.hosts, [np.array([h for _, _, h in t.host], np.int32) for t in s.tickets.values()])
    _counters(s)


def _rows(s: SchedState) -> None:
    c, rows = s.config, np.flatnonzero(s.status)
    away = {row for _, row in s.away}
    assert set(s.running) == set(np.flatnonzero(s.status == RUNNING)), "running rows and their status"
    assert away == set(np.flatnonzero(s.status >= LEAVING)) and len(s.away) == len(away), "rows away and their status"
    assert len(s.running) <= c.max_seqs and len(np.unique(s.running)) == len(s.running)                 # S1
    pend, fly = pending(s), flying(s)
    for plan in s.inflight:
        assert plan.tokens <= c.max_step_tokens and (plan.grant >= 1).all() and (plan.drafts >= 0).all()    # S1
        assert (plan.kv_len <= c.max_model_len - 1).all(), "a position that no token may take"          # S11
        assert (s.status[plan.rows] != FREE).all(), "a row was freed while a plan in flight holds it"
    live = rows[s.status[rows] != ENDED]           # an ended row's late tokens are dropped
    assert (s.sched[live] <= (s.tokens.lengths + pend)[live]).all(), "more handed out than wanted"      # S2
    assert (fly[rows] <= s.sched[rows]).all() and (pend >= 0).all()                                     # S3
    quiet = [r for r in s.running if not fly[r] and s.tokens.lengths[r] > s.base[r]]
    assert (s.sched[quiet] == s.tokens.lengths[quiet] - 1).all(), "a decode at rest lacks its last token only"
    assert (s.tokens.lengths[live] < s.limit[live]).all() and (s.limit[rows] <= c.max_model_len).all()  # S11
    assert not fly[s.status == LOADING].any()


def _requests(s: SchedState) -> None:
    """S4: every request is in one place."""
    rows = np.flatnonzero(s.status)
    at = {t.row: id for id, t in s.tickets.items() if t.place == ROW}
    assert at == {int(r): s.ids[r] for r in rows if s.status[r] != ENDED}, "tickets and rows"
    assert all((t.row >= 0) == (t.place == ROW) for t in s.tickets.values())
    queued = {e[2] for e in s.queue.entries() if is_waiting(s, e)}
    assert queued == {id for id, t in s.tickets.items() if t.place == QUEUED}, "tickets and queue"
    assert len(queued) == s.waiting
    assert s.parked == tuple(sum(t.place == p for t in s.tickets.values()) for p in (GRAMMAR, INPUT)), "parked"


def _held(s: SchedState) -> list[np.ndarray]:
    return [b[b > 0] for row in np.flatnonzero(s.status).tolist() for b in s.blocks_of(row)]


def _blocks(s: SchedState) -> None:
    """K6, K9: tables cover what is computed and hold no more than they may."""
    c, table, w, done = s.config, s.table.array, s.config.width, s.sched - flying(s)
    owed = 0
    for row in range(c.max_seqs):
        for g, (lane, spec) in enumerate(zip(s.lanes(row), c.groups, strict=True)):
            entries = table[lane * w : (lane + 1) * w]
            used = int(s.nblk[lane])
            assert not entries[used:].any() and not entries[: s.first[lane]].any(), "table outside its blocks"
            assert np.count_nonzero(entries) == s.held[lane], "count of held blocks"
            if s.status[row] == FREE:
                assert used == 0
                continue
            if s.status[row] in (RUNNING, LEAVING):
                size = spec.block_tokens
                assert used * size >= s.sched[row], "no block for a computed token"
                low = unneeded(spec, int(done[row]))
                stop = -(-int(s.sched[row]) // size)
                need = range(low, stop) if spec.kind != "recurrent" else range(max(stop - 1, 0), stop)
                assert all(entries[i] for i in need), f"group {g} lacks a block that the next token reads"
                assert s.held[lane] <= c.most(c.max_model_len)[g], "more blocks than the group's cap"   # K9
        if s.status[row] in (RUNNING, LOADING):
            owed += owed_to(s, row)
    # A shared block that one holder gives back is not free, so with both the promise is no guarantee.
    assert owed <= s.pool.free or (c.sliding and c.prefix_cache), f"{owed} blocks promised, {s.pool.free} free"


def _pool(pool, held: list[np.ndarray]) -> None:
    """K1, K2, K4: holders are counted, free blocks have none, names and blocks agree."""
    refs, born, free, names = pool.part(2), pool.part(3), pool.ids(), pool.names.array
    count = np.bincount(np.concatenate([np.zeros(0, np.int64), *held]).astype(np.int64), minlength=pool.size + 1)
    assert (count == refs).all(), f"holders {np.flatnonzero(count != refs)}"                            # K2
    assert sorted(free) == (np.flatnonzero(refs[1:] == 0) + 1).tolist(), "free list"                    # K1
    assert len(free) == pool.free
    assert {int(b): names[b] for b in np.flatnonzero(born)} == {b: k for k, b in pool.blocks.items()}   # K4
    assert all(names[b] is None for b in np.flatnonzero(born == 0))
    assert refs[0] == 0 and names[0] is None, "the null block"


def _counters(s: SchedState) -> None:
    """A15: no counter is negative, and hits are part of what was looked up."""
    names = ("dropped", "preemptions", "swaps", "recomputed", "refound", "queried", "hits", "prompted", "loaded",
             "drafted", "accepted")
    assert all(getattr(s, n) >= 0 for n in names)
    assert s.hits <= s.queried and s.accepted <= s.drafted and s.swaps <= s.preemptions
