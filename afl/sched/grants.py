"""How many tokens each running row gets, and who is preempted when blocks run out.

One rule: a row wants its known and pending tokens computed; it gets what is missing, as far as its chunk, the token
budget and the blocks allow.  Prefill, chunks, decode and recomputation are the same rule with different numbers.
Blocks that were promised at admission count as taken, so a prompt that was let in can be computed to its end.
"""

import attrs
import numpy as np

from afl.sched.loops import FENCED, compiled, empty32, find_wants, fit
from afl.sched.notes import NOTHING, Notes, of_rows
from afl.sched.policy import Bound
from afl.sched.rows import fence_of
from afl.sched.state import LOADING, PREEMPTED, SWAPPED, SchedState, pending

WHY = ("", "limit", "host", "budget", "fence", "select", "cap")
SELECT, CAP = 5, 6


@attrs.frozen(eq=False)
class Wants:
    """What the running rows want, in running order; all int32 [r]."""

    want: np.ndarray                   # known and pending tokens
    left: np.ndarray                   # those not handed out yet, 0 if the row may not go on now
    drafts: np.ndarray                 # draft tokens that it may add
    why: np.ndarray                    # reason code of those that may not


@attrs.frozen(eq=False)
class Grants:
    """The running part of a plan."""

    rows: np.ndarray                   # intp [r]
    grant: np.ndarray                  # int32 [r], each >= 1
    drafts: np.ndarray                 # int32 [r], those among them
    emit: np.ndarray                   # bool [r]
    budget: int                        # tokens left
    take: int                          # blocks needed now
    spare: int                         # blocks left that are neither taken nor promised
    fates: dict[int, int]              # rows to preempt -> PREEMPTED or SWAPPED
    notes: Notes


def wants_of(s: SchedState, most_drafts: int) -> Wants:
    """What each running row could use."""
    n = len(s.running)
    w = Wants(empty32(n), empty32(n), empty32(n), empty32(n))
    compiled(find_wants)(s.running, s.tokens.lengths, pending(s), s.sched, s.limit, s.base, s.needs_host, most_drafts,
                         w.want, w.left, w.drafts, w.why)
    return w


def grant_running(s: SchedState, policy: Bound, wants: Wants, rows: np.ndarray, left: np.ndarray) -> Grants:
    """Grants for `rows`, in their order.  Whole columns unless blocks run out.

    wants: of all running rows.  rows, left: the same rows as the policy has selected them.
    """
    w = wants if rows is s.running else _permuted(s, wants, rows)
    n, start, why = len(rows), s.sched[rows], w.why.copy()
    capped = left
    for cap in policy.chunk:
        capped = np.minimum(capped, cap(s, start, left, (), policy.params))
    grant, drafts, emit = empty32(n), empty32(n), np.empty(n, bool)
    budget, take, owed, starved = _fit(s, rows, capped, w, s.config.max_step_tokens, grant, drafts, emit, why)
    if policy.select is not None or len(policy.chunk) > 1:              # somebody other than the mechanics has chosen
        quiet = (why == 0) & (w.left > 0)
        why[quiet & (left == 0)] = SELECT
        why[quiet & (left > 0) & (capped < 1)] = CAP
    spare = s.pool.free - take - owed - _owed_to_loading(s)
    if spare < 0:
        return _squeeze(s, policy, rows, capped, w)
    some = np.count_nonzero(grant) < n
    notes = of_rows(s.ids[rows], why, WHY, w.want - s.sched[rows], np.where(why == 3, budget, s.limit[rows])) if (
        some and why.any()) else NOTHING
    if some:
        keep = grant > 0
        rows, grant, drafts, emit = rows[keep], grant[keep], drafts[keep], emit[keep]
    return Grants(rows, grant, drafts, emit, budget, take, spare, {}, notes)


def _fit(s, rows, capped, w: Wants, budget: int, grant, drafts, emit, why):
    c = s.config
    return compiled(fit)(
        rows, capped, w.drafts, s.sched, s.base, s.junction, w.want, c.max_seqs, c.sizes, c.codes, s.nblk, s.held,
        s.promise, c.cut, budget, grant, drafts, emit, why)


def _permuted(s: SchedState, w: Wants, rows: np.ndarray) -> Wants:
    place = np.empty(s.config.max_seqs, np.intp)
    place[s.running] = np.arange(len(s.running))
    at = place[rows]
    return Wants(w.want[at], w.left[at], w.drafts[at], w.why[at])


def _owed_to_loading(s: SchedState) -> int:
    """Blocks promised to rows whose content is still coming."""
    if not s.loading:
        return 0
    return sum(owed_to(s, row) for row in np.flatnonzero(s.status == LOADING).tolist())


def owed_to(s: SchedState, row: int) -> int:
    """Blocks that a row may still take on the promise made at its admission.

    If what is being loaded does not come, all is computed here, also what sliding groups would never have held.
    """
    if s.sched[row] >= s.base[row]:
        return 0
    total = 0
    for spec, lane in zip(s.config.groups, s.lanes(row), strict=True):
        if s.status[row] == LOADING and s.config.sliding:
            total += max(0, int(s.promise[lane] - s.held[lane]))
            continue
        entries = -(-int(s.base[row]) // spec.block_tokens) - int(s.nblk[lane])
        total += max(0, min(int(s.promise[lane] - s.held[lane]), entries))
    return total


def _squeeze(s: SchedState, policy: Bound, rows: np.ndarray, capped: np.ndarray, w: Wants) -> Grants:
    """The same row by row, with preemption: a row without blocks waits for those of rows away, or takes a victim's.

    Draft tokens never cost anybody anything: they are left out where blocks are short.  A request that has yielded
    nothing since its admission is no victim while there is another; a row that needs a block beyond its promise has
    yielded something, so there is always a candidate: itself.
    """
    none = attrs.evolve(w, drafts=np.zeros_like(w.drafts))
    books = _Books(s)
    budget, notes, why = s.config.max_step_tokens, [], w.why.copy()
    granted: dict[int, tuple[int, int, bool, int, int]] = {}     # row -> (tokens, drafts, emits, new blocks, blocks)
    fates: dict[int, int] = {}
    grant, drafts, emit = empty32(1), empty32(1), np.empty(1, bool)
    for i, row in enumerate(rows.tolist()):
        if row in fates:
            continue
        one = slice(i, i + 1)
        need = take = 0
        for which in (w, none):
            part = Wants(which.want[one], which.left[one], which.drafts[one], which.why[one])
            _, take, owed, _ = _fit(s, rows[one], capped[one], part, budget, grant, drafts, emit, why[one])
            need = take + owed - books.owed[row]
            if need <= books.spare:
                break
        n, d, emits = int(grant[0]), int(drafts[0]), bool(emit[0])
        if not n:
            continue
        while need > books.spare + books.coming and row not in fates:
            able = _candidates(s, rows, w.want, fates)
            if not len(able):
                break
            victim = int(policy.victim(s, able, policy.params))
            tokens, _, _, blocks, _ = granted.pop(victim, (0, 0, False, 0, 0))
            budget += tokens
            gain = books.release(victim, blocks)
            swap = policy.action(s, victim, policy.params) == "swap" and s.config.host_blocks > 0
            fates[victim] = SWAPPED if swap else PREEMPTED
            notes.append((s.ids[victim], "swapped" if swap else "preempted", gain, int(s.sched[victim])))
        if row in fates:
            continue
        if need > books.spare:
            books.wait(need)
            why[i] = FENCED
        else:
            budget -= n
            books.spare -= need
            granted[row] = (n, d, emits, need, take)
    skips = of_rows(s.ids[rows], np.where(np.isin(rows, list(fates)), 0, why), WHY, w.left, s.limit[rows])
    out = np.array(list(granted), np.intp)
    n, d, e = ([g[k] for g in granted.values()] for k in range(3))
    take = sum(g[4] for g in granted.values())
    parts = np.array(n, np.int32), np.array(d, np.int32), np.array(e, bool)
    return Grants(out, *parts, budget, take, books.spare, fates, skips + Notes.of(notes))


def _candidates(s: SchedState, rows: np.ndarray, want: np.ndarray, fates: dict[int, int]) -> np.ndarray:
    """Rows that may be preempted, in admission order: those that have yielded a token, known or in flight."""
    wants = dict(zip(rows.tolist(), want.tolist(), strict=True))
    able = [r for r in s.running.tolist() if r not in fates]
    return np.array([r for r in able if wants[r] > s.base[r]] or able, np.int32)


class _Books:
    """Blocks while a plan is being squeezed: what is free for anybody, what is promised, what comes back later."""

    def __init__(self, s: SchedState) -> None:
        self.s = s
        self.lost: dict[int, int] = {}                                      # block -> holders that have gone
        self.owed = {r: owed_to(s, r) for r in s.running.tolist()}
        self.coming = sum(self._freed(row) for _, row in s.away)
        self.spare = s.pool.free - sum(self.owed.values()) - _owed_to_loading(s)

    def release(self, row: int, granted: int) -> int:
        """A victim gives back what it was granted in this step, its promise, and its blocks, now or later."""
        blocks = self._freed(row)
        self.spare += granted + self.owed.pop(row)
        if fence_of(self.s, row):
            self.coming += blocks
        else:
            self.spare += blocks
        return blocks

    def wait(self, need: int) -> None:
        """What is free now stays so for a row that also needs blocks which come later."""
        self.coming -= max(0, need - max(self.spare, 0))
        self.spare = min(self.spare, 0)

    def _freed(self, row: int) -> int:
        """Blocks that nobody holds once this row is gone too."""
        refs, n = self.s.pool.part(2), 0
        for blocks in self.s.blocks_of(row):
            for b in blocks[blocks > 0].tolist():
                self.lost[b] = self.lost.get(b, 0) + 1
                n += int(refs[b] == self.lost[b])
        return n
