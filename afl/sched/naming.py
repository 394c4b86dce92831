"""Names for blocks whose content is known, so that later requests find them.

A block gets its name in the step that hands out its last token, if the host knows all its tokens by then: device work
is ordered, so whoever finds it reads it later.  Otherwise it waits until they are known; draft tokens that may still
be rejected are thus never part of a name.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from afl.sched import hashing
from afl.sched.events import Request
from afl.sched.loops import compiled, empty32, find_due
from afl.sched.state import SEALED, SchedState, Ticket, evolve


def root_of(s: SchedState, r: Request) -> bytes:
    """The domain in which a request shares prefixes."""
    return hashing.root(r.adapter, r.adapter_version, r.salt, s.weights)


def named(s: SchedState, t: Ticket) -> Ticket:
    """The ticket with the names of all its full blocks; only what is missing is hashed."""
    if not s.config.prefix_cache:
        return t
    chain = t.chain if t.weights == s.weights else ()
    chain = hashing.extend(chain, lambda: root_of(s, t.request), t.tokens, s.config.unit, t.request.items)
    return t if chain is t.chain else attrs.evolve(t, chain=chain, weights=s.weights)


def name_rows(s: SchedState, rows: np.ndarray) -> SchedState:
    """Name the full blocks of `rows` that have no name yet."""
    if not s.config.prefix_cache:
        return s
    due = empty32(len(rows))
    n = compiled(find_due)(rows, s.sched, s.tokens.lengths, s.hashed, s.config.unit, due)
    if not n:
        return s
    hashed, chains, pairs = s.hashed.copy(), s.chain.copy(), []
    for row in due[:n].tolist():
        full = min(int(s.sched[row]), int(s.tokens.lengths[row])) // s.config.unit
        chain: Any = chains[row]
        if len(chain) < full:
            ticket = s.tickets.get(s.ids[row])
            if ticket is None or ticket.number != s.number[row]:        # it has ended and was forgotten
                continue
            r = ticket.request
            tokens = s.tokens[row][: full * s.config.unit]
            chains[row] = chain = hashing.extend(chain, lambda r=r: root_of(s, r), tokens, s.config.unit, r.items)
        pairs += _pairs(s, row, chain, int(hashed[row]), full)
        hashed[row] = full
    return evolve(s, pool=s.pool.name(pairs, s.step), hashed=hashed, chain=chains)


def seal(s: SchedState) -> SchedState:
    """Forget all names, and give none to what rows hold now: it was computed under conditions that are over."""
    hashed = np.where(s.status > 0, SEALED, s.hashed).astype(np.int32)
    return evolve(s, pool=s.pool.forget(), hashed=hashed)


def _pairs(s: SchedState, row: int, chain: tuple[bytes, ...], start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(block, key) of the row's blocks that end within units start..stop.

    A recurrent group has a state only where a chunk ended, and chunks that pass a block's end do end there
    (`loops.fit`), so a block that is held has the state at its end.
    """
    unit, w = s.config.unit, s.config.width
    table = s.table.array
    if len(s.config.groups) == 1 and s.config.groups[0].kind == "full":
        blocks = table[row * w + start : row * w + stop].tolist()
        yield from zip(blocks, chain[start:stop], strict=True)
        return
    for g, (spec, lane) in enumerate(zip(s.config.groups, s.lanes(row), strict=True)):
        each = spec.block_tokens // unit
        for i in range(start // each, stop // each):
            block = int(table[lane * w + i])
            if block:
                yield block, hashing.key(chain[(i + 1) * each - 1], g)
