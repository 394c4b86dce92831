"""From one placement to another: which slots change, in what order they may, and where each expert is copied from.

A write puts an expert into a slot and thereby drops the one that was there.  Almost any order of writes is fine; only
an expert that no rank keeps needs care: its last old copy may not go before a new one is in place.  So a write waits
for at most one other write and is waited for by at most one: the waiting writes form chains and rings.  A chain is done
from its free end, a ring at once.  `settle` pairs arrivals with vacated slots such that no ring visits a rank twice;
one staged expert per rank is then always enough.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from afl.dist.eplb.values import Placement, Topology, Transfer
from afl.errors import BalanceError, violations


class Write(NamedTuple):
    """Slot `slot` of a layer (counted over all ranks) is to hold `expert`."""

    layer: int
    slot: int
    expert: int


class Unit(NamedTuple):
    """Writes of one layer that must commit together."""

    writes: tuple[Write, ...]
    behind: int                         # place in the list of the unit that may not commit later, -1: none


def settle(old: Placement, new: Placement) -> Placement:
    """The experts of `new` on the same ranks, but whoever stays on a rank stays in its slot, and arrivals take the
    vacated slots in an order that one staged expert per rank can carry out.

    Raises `BalanceError` if the placements differ in shape or holes, or if `new` has an expert twice on a rank.

    >>> old, new = Placement([[0, 1, 2, 3]], 2), Placement([[2, 0, 3, 1]], 2)
    >>> settle(old, new).phys_to_log.tolist()
    [[0, 2, 1, 3]]
    """
    comparable(old, new)
    rows = old.phys_to_log.copy()
    size, bad = old.slots_per_rank, []
    for layer in np.flatnonzero((old.phys_to_log != new.phys_to_log).any(1)):
        row = rows[layer]
        for r, (before, after) in enumerate(zip(old.by_rank[layer], new.by_rank[layer], strict=True)):
            if np.array_equal(before, after):
                continue
            real = after[after >= 0]
            if len(np.unique(real)) < len(real):
                bad.append(f"layer {layer}, rank {r}: an expert is there twice: {after.tolist()}")
                continue
            vacated = np.flatnonzero((before >= 0) & ~np.isin(before, after))
            row[r * size + vacated] = real[~np.isin(real, before)]
        for ring in _rings(waits(old.phys_to_log[layer], row)):
            _untangle(row, ring, size)
    if bad:
        raise BalanceError(violations("new placement", bad))
    return Placement(rows, old.ranks)


def comparable(old: Placement, new: Placement) -> None:
    """Raise `BalanceError` unless both placements have the same ranks, layers, slots and holes."""
    if (old.ranks, old.phys_to_log.shape) != (new.ranks, new.phys_to_log.shape):
        raise BalanceError(f"placements of different shape: {old.ranks} ranks, {list(old.phys_to_log.shape)} now and "
                           f"{new.ranks} ranks, {list(new.phys_to_log.shape)} wanted; convert one of them first")
    if ((old.phys_to_log < 0) != (new.phys_to_log < 0)).any():
        layer, slot = np.argwhere((old.phys_to_log < 0) != (new.phys_to_log < 0))[0]
        raise BalanceError(f"layer {layer}, slot {slot}: a hole in one placement only; a hole is memory that a rank "
                           "does not have, it cannot move")


def waits(old: np.ndarray, new: np.ndarray) -> dict[int, int]:
    """Slot -> the slot whose write may not come later, for one layer's rows int32 [slots].

    An expert that keeps no slot: the write over its last old slot waits for the first of its new ones.
    """
    changed = np.flatnonzero(old != new)
    kept = set(old[old == new].tolist())
    leaves, comes = {}, {}
    for s in changed.tolist():
        leaves[int(old[s])] = s
        comes.setdefault(int(new[s]), s)
    return {s: comes[e] for e, s in leaves.items() if e not in kept and e in comes}


def _rings(wait: dict[int, int]) -> list[list[int]]:
    """The cycles of `wait`, each in waiting order."""
    rings, seen = [], set()
    for start in sorted(wait):
        path, s = [], start
        while s in wait and s not in seen:
            seen.add(s)
            path.append(s)
            s = wait[s]
        if path and s == start:
            rings.append(path)
        elif s in path:
            raise AssertionError(f"slot {s} is waited for twice")
    return rings


def _untangle(row: np.ndarray, ring: Sequence[int], size: int) -> None:
    """Exchange arrivals within a rank until no ring visits a rank twice: each exchange cuts one ring into two."""
    path: list[int] = []
    where: dict[int, int] = {}          # rank -> place in path
    for s in ring:
        i = where.get(s // size)
        if i is None:
            where[s // size] = len(path)
            path.append(s)
            continue
        row[[path[i], s]] = row[[s, path[i]]]
        for gone in path[i + 1:]:
            del where[gone // size]
        path[i:] = [s]


def units(old: Placement, new: Placement, layer: int) -> list[Unit]:
    """The writes that turn a layer of `old` into that of `new`, in an order in which each may be done.

    A ring is one unit, every other write is one by itself, somewhere behind the one that it waits for.
    """
    before, after = old.phys_to_log[layer], new.phys_to_log[layer]
    wait = waits(before, after)
    place: dict[int, int] = {}          # slot -> its unit
    out: list[Unit] = []

    def add(slots: Sequence[int], behind: int) -> None:
        place.update(dict.fromkeys(slots, len(out)))
        out.append(Unit(tuple(Write(layer, s, int(after[s])) for s in slots), behind))

    for ring in _rings(wait):
        add(ring, -1)
    for s in np.flatnonzero(before != after).tolist():
        chain = []
        while s not in place and s in wait:
            chain.append(s)
            s = wait[s]
        if s not in place:
            add([s], -1)
        for c in reversed(chain):
            add([c], place[wait[c]])
    return out


def sources(writes: Sequence[Write], now: Placement, topology: Topology, sent: np.ndarray | None = None,
            ) -> list[Transfer]:
    """A source for each write among the ranks that hold its expert in `now`: the nearest; of those the one that sends
    least so far.  Experts with few holders choose first.  `sent`: int64 [ranks], earlier transfers, only breaks ties.
    """
    size, near = now.slots_per_rank, _distance(topology)
    sent = np.zeros(now.ranks, np.int64) if sent is None else sent
    sends = np.zeros(now.ranks, np.int64)
    wanted = {(w.layer, w.expert) for w in writes}
    holders = {(x, e): np.flatnonzero(now.phys_to_log[x] == e) for x, e in wanted}
    found: dict[Write, Transfer] = {}
    for w in sorted(writes, key=lambda w: (len(holders[w.layer, w.expert]), w)):
        at = holders[w.layer, w.expert]
        if not len(at):
            raise BalanceError(f"layer {w.layer}: no rank holds expert {w.expert}, so nobody can send it")
        ranks, dst = at // size, w.slot // size
        best = np.lexsort((ranks, sent[ranks], sends[ranks], near[ranks, dst]))[0]
        sends[ranks[best]] += 1
        found[w] = Transfer(w.layer, w.expert, int(ranks[best]), int(at[best] % size), dst, w.slot % size)
    return [found[w] for w in writes]


def _distance(t: Topology) -> np.ndarray:
    """int [ranks, ranks]: 0 same die pair, 1 same node, 2 other node."""
    same_node = t.node[:, None] == t.node
    return np.where(same_node, np.where(t.die_pair[:, None] == t.die_pair, 0, 1), 2)


def apply(now: Placement, transfers: Iterable[Transfer]) -> Placement:
    """The placement after staged experts took their slots."""
    rows = now.phys_to_log.copy()
    for t in transfers:
        rows[t.layer, t.dst_rank * now.slots_per_rank + t.dst_slot] = t.expert
    return Placement(rows, now.ranks)
