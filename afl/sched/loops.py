"""The loops over rows that run in every step, compiled by numba on first use.

They are plain Python over arrays and give the same results uncompiled (NUMBA_DISABLE_JIT=1).  A call costs 3 to 5 us
with compilation, where a chain of numpy calls costs 1 to 6 us each (256 rows, measured).
"""

from collections.abc import Callable
from functools import cache

import numpy as np


@cache
def compiled(loop: Callable) -> Callable:
    """The machine code of `loop`; kept on disk between processes."""
    import numba

    return numba.njit(cache=True)(loop)


def find_ends(rows, tokens, lengths, stops, floor, limit, finish):
    """Write 1 (a stop token), 2 (the length limit) or 0 to `finish` for each row; returns how many ended."""
    ended = 0
    for i in range(len(rows)):
        row, total, code = rows[i], lengths[rows[i]], 0
        if total >= floor[row]:
            for k in range(stops.shape[1]):
                if stops[row, k] == tokens[i]:
                    code = 1
        if code == 0 and total >= limit[row]:
            code = 2
        finish[i] = code
        ended += code != 0
    return ended


def find_wants(rows, lengths, pend, sched, limit, needs_host, want, left):
    """Write each row's known and pending tokens to `want`, those not yet handed out to `left`.

    Nothing is left when all the output a row may have is in flight (counted first), or when its next step depends on
    a token that the host has not seen (counted second).
    """
    limited = hosted = 0
    for i in range(len(rows)):
        row = rows[i]
        want[i] = lengths[row] + pend[row]
        left[i] = want[i] - sched[row]
        if want[i] >= limit[row]:
            left[i] = 0
            limited += 1
        elif needs_host[row] and pend[row] > 0:
            left[i] = 0
            hosted += 1
    return limited, hosted


def fit(rows, capped, sched, nblk, promise, want, block_tokens, budget, grant, emit):
    """Cut `capped` to the token budget in row order, into `grant`; `emit` tells who reaches the end of `want`.

    Returns the budget left, the blocks that are taken or promised beyond those held, and how many rows got nothing
    though they wanted something.
    """
    blocks = starved = 0
    for i in range(len(rows)):
        row = rows[i]
        n = min(capped[i], budget)
        grant[i] = n
        emit[i] = sched[row] + n == want[i]
        budget -= n
        starved += n == 0 and capped[i] > 0
        blocks += max((sched[row] + n + block_tokens - 1) // block_tokens, promise[row], nblk[row]) - nblk[row]
    return budget, blocks, starved


def extend(rows, grant, block_tokens, sched, nblk, start, need):
    """Add the grants to `sched` and the blocks they need to `nblk`; `start` and `need` tell what was there and is new.

    Returns the number of new blocks, the widest row and the number of tokens.
    """
    total = width = tokens = 0
    for i in range(len(rows)):
        row = rows[i]
        start[i] = sched[row]
        sched[row] += grant[i]
        blocks = (sched[row] + block_tokens - 1) // block_tokens
        need[i] = blocks - nblk[row]
        nblk[row] = blocks
        total += need[i]
        width = max(width, blocks)
        tokens += grant[i]
    return total, width, tokens


def gather(rows, table, out):
    """Copy the first entries of each row's block table."""
    for i in range(len(rows)):
        for k in range(out.shape[1]):
            out[i, k] = table[rows[i], k]


def add_pending(rows, emit, out):
    """Count one token for each row that emits."""
    for i in range(len(rows)):
        out[rows[i]] += emit[i]


def empty32(n: int) -> np.ndarray:
    """An int32 vector that a loop fills."""
    return np.empty(n, np.int32)
