"""The loops over rows that run in every step, compiled by numba on first use.

They are plain Python over arrays and give the same results uncompiled (NUMBA_DISABLE_JIT=1).  A call costs 3 to 5 us
with compilation, where a chain of numpy calls costs 1 to 6 us each (256 rows, measured).

Columns per cache group are flat: the lane of row r in group g is g * n + r with n rows.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

LIMITED, HOSTED, STARVED, FENCED = range(1, 5)     # why a running row got nothing


@cache
def compiled(loop: Callable) -> Callable:
    """The machine code of `loop`; kept on disk between processes."""
    import numba

    return numba.njit(cache=True)(loop)


def find_ends(rows, tokens, count, lengths, stops, floor, limit, taken, finish):
    """How many of each row's new tokens stay, into `taken`, and why the row ends, into `finish`.

    tokens: [r, 1 + k] of which count[i] are real.  finish: 1 a stop token, 2 the length limit, 0 goes on.  Returns how
    many rows ended.
    """
    ended = 0
    for i in range(len(rows)):
        row, code, n = rows[i], 0, 0
        while n < count[i] and code == 0:
            total = lengths[row] + n + 1
            if total >= floor[row]:
                for k in range(stops.shape[1]):
                    if stops[row, k] == tokens[i, n]:
                        code = 1
            if code == 0 and total >= limit[row]:
                code = 2
            n += 1
        taken[i], finish[i] = n, code
        ended += code != 0
    return ended


def find_wants(rows, lengths, pend, sched, limit, base, needs_host, most, want, left, drafts, why):
    """Write what each row wants computed: `want` tokens in all, `left` of them not yet handed out, and its drafts.

    Nothing is left when all the output a row may have is in flight (LIMITED), or when its next step depends on a token
    that the host has not seen (HOSTED).  A row that has sampled before may add `most` draft tokens, as far as its
    limit allows.  Returns how many rows got a reason.
    """
    found = 0
    for i in range(len(rows)):
        row = rows[i]
        want[i] = lengths[row] + pend[row]
        left[i] = want[i] - sched[row]
        drafts[i] = 0
        why[i] = 0
        if want[i] >= limit[row]:
            left[i], why[i] = 0, 1
            found += 1
        elif needs_host[row] and pend[row] > 0:
            left[i], why[i] = 0, 2
            found += 1
        elif most > 0 and left[i] == 1 and want[i] > base[row] and not needs_host[row]:
            drafts[i] = max(0, min(most, limit[row] - want[i] - 1))
    return found


def fit(rows, capped, drafts, sched, base, junction, want, n, sizes, codes, nblk, held, promise, align, budget,
        grant, given, emit, why):
    """Cut `capped` to the token budget in row order, into `grant`; `emit` tells who reaches the end of `want`.

    Those who do take their drafts along, counted in `given` and in `grant`.  With recurrent groups (align > 0) a chunk
    of a prompt ends where a state is worth keeping: at a junction, else at a multiple of `align`; the first one after a
    start between two multiples, since the state there lies in a block that would get the name of its end.  Returns the
    budget left, the blocks that are taken, those that stay promised, and how many rows got nothing though they wanted
    something.
    """
    take = owed = starved = 0
    for i in range(len(rows)):
        row = rows[i]
        start = sched[row]
        k = min(capped[i], budget)
        if k > 0 and align > 0 and start < base[row]:
            end, last = start + k, base[row] // align * align
            whole = (start // align + 1) * align
            if start % align and whole < end:      # the block that holds the state of `start` gets that of its end
                end = whole
            elif start < junction[row] < end:
                end = junction[row]
            elif end < last:
                if end // align * align > start:
                    end = end // align * align
            elif start < last < end:
                end = last
            k = end - start
        emit[i] = k > 0 and start + k == want[i]
        given[i] = min(drafts[i], budget - k) if emit[i] else 0
        grant[i] = k + given[i]
        budget -= grant[i]
        if k == 0 and capped[i] > 0:
            starved += 1
            why[i] = 3
        end = start + grant[i]
        for g in range(len(sizes)):
            lane = g * n + row
            new = max(0, (end + sizes[g] - 1) // sizes[g] - nblk[lane])
            if codes[g] == 2:
                new = min(new, 1)
            take += new
            if start + k < base[row]:
                entries = (base[row] + sizes[g] - 1) // sizes[g] - max(nblk[lane], (end + sizes[g] - 1) // sizes[g])
                owed += max(0, min(promise[lane] - held[lane] - new, entries))
    return budget, take, owed, starved


def extend(rows, grant, n, w, sizes, codes, sched, nblk, held, start, where, width):
    """Add the grants to `sched` and the blocks they need; `start` tells what was there before.

    `where` receives the places in the flat block table (rows of w) that want a block, `width` the widest row of each
    group.  Returns the number of places and of tokens.
    """
    total = tokens = 0
    for i in range(len(rows)):
        row = rows[i]
        start[i] = sched[row]
        sched[row] += grant[i]
        tokens += grant[i]
        for g in range(len(sizes)):
            lane = g * n + row
            blocks = (sched[row] + sizes[g] - 1) // sizes[g]
            first = nblk[lane]
            if blocks > first:
                if codes[g] == 2:
                    first = blocks - 1             # a state is written at the end of the chunk only
                for k in range(first, blocks):
                    where[total] = lane * w + k
                    total += 1
                held[lane] += blocks - first
                nblk[lane] = blocks
            width[g] = max(width[g], nblk[lane])
    return total, tokens


def gather(rows, first, w, table, out):
    """Copy the first entries of each row's block table; `first`: place of row 0 of the group."""
    for i in range(len(rows)):
        at = first + rows[i] * w
        for k in range(out.shape[1]):
            out[i, k] = table[at + k]


def find_due(rows, sched, lengths, hashed, unit, out):
    """The rows with full blocks of known, handed-out tokens that have no name yet; returns how many."""
    n = 0
    for i in range(len(rows)):
        row = rows[i]
        if min(sched[row], lengths[row]) // unit > hashed[row]:
            out[n] = row
            n += 1
    return n


def find_past(rows, done, n, w, sizes, codes, windows, first, nblk, held, table, where):
    """Places in the block table that no step can read any more, into `where`; moves `first` and `held`."""
    total = 0
    for i in range(len(rows)):
        for g in range(len(sizes)):
            if codes[g] == 0:
                continue
            lane = g * n + rows[i]
            past = done[i] - windows[g] + 1 if codes[g] == 1 else done[i] - 1
            until = min(max(past, 0) // sizes[g], nblk[lane])
            for k in range(first[lane], until):
                if table[lane * w + k] != 0:
                    where[total] = lane * w + k
                    total += 1
                    held[lane] -= 1
            first[lane] = max(first[lane], until)
    return total


def add_pending(rows, emit, drafts, out):
    """Count the most tokens that each emitting row can yield."""
    for i in range(len(rows)):
        out[rows[i]] += emit[i] * (1 + drafts[i])


def add_flying(rows, grant, out):
    """Count the tokens of each row that are handed out and not yet observed."""
    for i in range(len(rows)):
        out[rows[i]] += grant[i]


def empty32(n: int) -> np.ndarray:
    """An int32 vector that a loop fills."""
    return np.empty(n, np.int32)
