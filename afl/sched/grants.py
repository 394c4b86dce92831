"""How many tokens each running row gets, and who is preempted when blocks run out.

One rule: a row wants its known and pending tokens computed; it gets what is missing, as far as its chunk, the token
budget and the blocks allow.  Prefill, chunks, decode and recomputation are the same rule with different numbers.
Blocks that were promised at admission count as taken, so a prompt that was let in can be computed to its end.
"""

import attrs
import numpy as np

from afl.sched.policy import Bound
from afl.sched.rows import fence_of
from afl.sched.state import SKIPS, SchedState, pending


@attrs.frozen(eq=False)
class Grants:
    """The running part of a plan."""

    rows: np.ndarray                   # int32 [r]
    grant: np.ndarray                  # int32 [r], each >= 1
    emit: np.ndarray                   # bool [r]
    budget: int                        # tokens left
    spare: int                         # blocks left that are neither taken nor promised
    victims: tuple[int, ...] = ()      # rows to preempt
    skips: tuple[str, ...] = ()        # a reason for each row that got nothing


def grant_running(s: SchedState, policy: Bound) -> Grants:
    """Grants for the rows in `running`, in its order.  Whole columns unless blocks run out."""
    rows, skips = s.running, ()
    want, sched = s.tokens.lengths[rows], s.sched[rows]
    left = want - sched
    if s.inflight:
        pend = pending(s)[rows]
        want = want + pend
        full = want >= s.limit[rows]                       # all the output it may have is in flight
        host = s.needs_host[rows] & (pend > 0)             # its next step depends on a token nobody has seen
        left = np.where(full | host, 0, want - sched)
        if not left.all():
            skips = ("limit",) * int(full.sum()) + ("host",) * int((host & ~full).sum())
    capped = policy.chunk(s, left, policy.params)
    budget = s.config.max_step_tokens
    total = int(capped.sum())
    grant = capped if total <= budget else np.clip(budget - (np.cumsum(capped) - capped), 0, capped)
    held = s.nblk[rows]
    target = np.maximum(-(-(sched + grant) // s.config.block_tokens), s.promise[rows])
    spare = s.pool.free - int((np.maximum(target, held) - held).sum())
    if spare < 0:
        return _squeeze(s, policy, want, capped, skips)
    emit = sched + grant == want
    if not grant.all():
        some = grant > 0
        skips += ("budget",) * int(((capped > 0) & ~some).sum())
        rows, grant, emit = rows[some], grant[some], emit[some]
    return Grants(rows, grant, emit, max(budget - total, 0), spare, (), skips)


def _squeeze(s: SchedState, policy: Bound, want: np.ndarray, capped: np.ndarray, skips: tuple) -> Grants:
    """The same row by row, with preemption: a row without blocks waits for those of rows away, or takes a victim's."""
    c, skips = s.config, list(skips)
    budget = c.max_step_tokens
    rows = [int(r) for r in s.running]
    has = {r: max(int(s.promise[r]), int(s.nblk[r])) for r in rows}         # blocks that are the row's already
    wants = dict(zip(rows, want.tolist(), strict=True))
    spare = s.pool.free - sum(has[r] - int(s.nblk[r]) for r in rows)
    coming = int(sum(s.nblk[row] for _, row in s.away))
    granted: dict[int, tuple[int, int]] = {}                                # row -> (tokens, blocks beyond `has`)
    victims: list[int] = []
    for row, asked in zip(rows, capped.tolist(), strict=True):
        n = min(asked, budget)
        beyond = max(0, c.blocks_for(s.sched[row] + n) - has[row])
        while row not in victims and n and beyond > spare + coming:
            victim = int(policy.victim(s, _candidates(s, rows, wants, victims), policy.params))
            tokens, blocks = granted.pop(victim, (0, 0))
            budget += tokens
            spare += blocks + has[victim]
            if fence_of(s, victim):                                         # its own blocks come back later
                spare, coming = spare - int(s.nblk[victim]), coming + int(s.nblk[victim])
            victims.append(victim)
        if row in victims:
            continue
        if n and beyond > spare:
            coming, spare = coming - (beyond - spare), 0
            skips.append("fence")
        elif n:
            budget, spare = budget - n, spare - beyond
            granted[row] = (n, beyond)
        elif asked:
            skips.append("budget")
    skips += ["preempted"] * len(victims)
    out = np.array(list(granted), np.int32)
    grant = np.array([n for n, _ in granted.values()], np.int32)
    emit = s.sched[out] + grant == np.array([wants[r] for r in granted], np.int32)
    return Grants(out, grant, emit, budget, spare, tuple(victims), tuple(skips))


def _candidates(s: SchedState, rows: list[int], wants: dict[int, int], victims: list[int]) -> np.ndarray:
    """Rows that may be preempted: a request preempted before must have yielded a token since.

    A row that needs a block beyond its promise has yielded one, so there is always a candidate: itself.
    """
    return np.array([r for r in rows if r not in victims and (not s.preempts[r] or wants[r] > s.base[r])], np.int32)


def counted(skips: tuple[int, ...], reasons: tuple[str, ...]) -> tuple[int, ...]:
    """The skip counters with `reasons` added."""
    if not reasons:
        return skips
    return tuple(n + reasons.count(name) for n, name in zip(skips, SKIPS, strict=True))
