"""How many tokens each running row gets, and who is preempted when blocks run out.

One rule: a row wants its known and pending tokens computed; it gets what is missing, as far as its chunk, the token
budget and the blocks allow.  Prefill, chunks, decode and recomputation are the same rule with different numbers.
Blocks that were promised at admission count as taken, so a prompt that was let in can be computed to its end.
"""

from collections.abc import Mapping

import attrs
import numpy as np

from afl.sched.loops import compiled, empty32, find_wants, fit
from afl.sched.policy import Bound
from afl.sched.rows import fence_of
from afl.sched.state import SKIPS, SchedState, pending


@attrs.frozen(eq=False)
class Grants:
    """The running part of a plan."""

    rows: np.ndarray                   # intp [r]
    grant: np.ndarray                  # int32 [r], each >= 1
    emit: np.ndarray                   # bool [r]
    budget: int                        # tokens left
    spare: int                         # blocks left that are neither taken nor promised
    victims: tuple[int, ...] = ()      # rows to preempt
    skips: Mapping[str, int] = {}      # rows that got nothing, by reason


def grant_running(s: SchedState, policy: Bound) -> Grants:
    """Grants for the rows in `running`, in its order.  Whole columns unless blocks run out."""
    rows, c, n = s.running, s.config, len(s.running)
    want, left, grant, emit = empty32(n), empty32(n), empty32(n), np.empty(n, bool)
    limited, hosted = compiled(find_wants)(
        rows, s.tokens.lengths, pending(s), s.sched, s.limit, s.needs_host, want, left)
    capped = policy.chunk(s, left, policy.params)
    budget, blocks, starved = compiled(fit)(
        rows, capped, s.sched, s.nblk, s.promise, want, c.block_tokens, c.max_step_tokens, grant, emit)
    skips = {"limit": limited, "host": hosted, "budget": starved} if limited or hosted or starved else {}
    if blocks > s.pool.free:
        return _squeeze(s, policy, want, capped, skips)
    if np.count_nonzero(grant) < n:
        some = grant > 0
        rows, grant, emit = rows[some], grant[some], emit[some]
    return Grants(rows, grant, emit, budget, s.pool.free - blocks, (), skips)


def _squeeze(s: SchedState, policy: Bound, want: np.ndarray, capped: np.ndarray, skips: dict[str, int]) -> Grants:
    """The same row by row, with preemption: a row without blocks waits for those of rows away, or takes a victim's."""
    c = s.config
    budget, waits, starved = c.max_step_tokens, 0, 0
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
            waits += 1
        elif n:
            budget, spare = budget - n, spare - beyond
            granted[row] = (n, beyond)
        elif asked:
            starved += 1
    skips = skips | {"budget": starved, "fence": waits, "preempted": len(victims)}
    out = np.array(list(granted), np.intp)
    grant = np.array([n for n, _ in granted.values()], np.int32)
    emit = s.sched[out] + grant == np.array([wants[r] for r in granted], np.int32)
    return Grants(out, grant, emit, budget, spare, tuple(victims), skips)


def _candidates(s: SchedState, rows: list[int], wants: dict[int, int], victims: list[int]) -> np.ndarray:
    """Rows that may be preempted: a request preempted before must have yielded a token since.

    A row that needs a block beyond its promise has yielded one, so there is always a candidate: itself.
    """
    return np.array([r for r in rows if r not in victims and (not s.preempts[r] or wants[r] > s.base[r])], np.int32)


def counted(skips: tuple[int, ...], reasons: Mapping[str, int]) -> tuple[int, ...]:
    """The skip counters with `reasons` added."""
    return tuple(n + reasons.get(name, 0) for n, name in zip(skips, SKIPS, strict=True)) if reasons else skips
