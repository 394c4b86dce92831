"""When each expert travels: waves that commit together, cut into rounds of at most one send and one receive per rank.

A wave takes as many writes as the staging slots hold.  Its transfers are edges of a bipartite multigraph, senders to
receivers, and rounds are its edge colours; the busiest rank alone needs as many rounds as it has transfers, and by
Konig's theorem so many are enough.  Nothing of a wave is overwritten before all of it has arrived, so an abort at any
moment leaves the committed placement whole.
"""

import math
from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np

from afl.dist.eplb.diff import Unit, Write, apply, comparable, sources, units
from afl.dist.eplb.values import Params, Placement, Round, Topology, Transfer
from afl.errors import BalanceError


@attrs.frozen
class Schedule:
    """Rounds in order; after each of them the layers that commit; the step in which each may start."""

    rounds: tuple[Round, ...] = ()
    commits: tuple[tuple[int, ...], ...] = ()
    starts: tuple[int, ...] = ()
    seconds: float = 0.0                # of all rounds, each as long as its slowest link
    bytes: int = 0


def schedule(old: Placement, new: Placement, topology: Topology, params: Params,
             order: Sequence[int] | None = None) -> Schedule:
    """The transfers that turn `old` into `new`, as rounds.  `order`: the layers, most urgent first.

    A rank never stages more than `params.staging` experts (0: as many as the busiest layer brings to one rank).
    In no step a link carries more than its bytes per second * `step_seconds` * `link_share`; an expert larger than that
    takes several steps.  Raises `BalanceError` for placements that do not fit each other.
    """
    comparable(old, new)
    order = range(old.layers) if order is None else order
    moved = (old.phys_to_log != new.phys_to_log).reshape(old.layers, old.ranks, -1).sum(2)
    staging = params.staging or int(moved.max(initial=0))
    now, sent = old, np.zeros(old.ranks, np.int64)
    rounds: list[Round] = []
    commits: list[tuple[int, ...]] = []
    ends: list[int] = []                # rounds after which a wave commits
    parts = [units(old, new, x) for x in order]
    if not params.staging:              # room for any layer as a whole
        parts = [[Unit(tuple(w for u in part for w in u.writes), -1)] for part in parts if part]
    for wave in _waves(parts, old, staging):
        moves = sources(wave, now, topology, sent)
        np.add.at(sent, [t.src_rank for t in moves], 1)
        made = colour(moves, old.ranks)
        rounds += made
        commits += [()] * (len(made) - 1) + [tuple(dict.fromkeys(w.layer for w in wave))]
        ends.append(len(rounds))
        now = apply(now, moves)
    seconds = [max(params.bytes_per_expert / topology.bytes_per_s_between(t.src_rank, t.dst_rank) for t in r)
               for r in rounds]
    return Schedule(tuple(rounds), tuple(commits), _starts(seconds, ends, params), sum(seconds),
                    params.bytes_per_expert * sum(map(len, rounds)))


def _waves(parts: Sequence[Sequence[Unit]], old: Placement, staging: int) -> list[list[Write]]:
    """Units in the first wave that is not before that of the unit which they wait for, and has staging slots left.

    Units that wait for nobody are only bound by room, so layers share waves.
    """
    waves: list[list[Write]] = []
    room: list[list[int]] = []          # wave, rank
    full = [0] * old.ranks              # waves before this one have no room on the rank
    for part in parts:
        at: list[int] = []
        for writes, behind in part:
            need = Counter(w.slot // old.slots_per_rank for w in writes)
            if max(need.values()) > staging:
                raise BalanceError(f"layer {writes[0].layer}: {len(writes)} experts change places in a ring, more than "
                                   f"{staging} of them on one rank; settle the new placement, or raise staging")
            i = max([at[behind] if behind >= 0 else 0, *(full[r] for r in need)])
            while i < len(waves) and any(room[i][r] < n for r, n in need.items()):
                i += 1
            if i == len(waves):
                waves.append([])
                room.append([staging] * old.ranks)
            waves[i] += writes
            at.append(i)
            for r, n in need.items():
                room[i][r] -= n
                while full[r] < len(waves) and room[full[r]][r] == 0:
                    full[r] += 1
    return waves


def colour(moves: Sequence[Transfer], ranks: int) -> list[Round]:
    """The transfers in exactly as many rounds as the busiest rank sends or receives.

    Each edge takes a colour free at its sender; if that is taken at its receiver, the path of edges that alternate
    between that colour and one free at the receiver is flipped.  O(moves * ranks) at worst.

    >>> edges = (1, 0), (1, 0), (1, 2), (3, 0)
    >>> [len(r) for r in colour([Transfer(0, 0, a, 0, b, 0) for a, b in edges], 4)]
    [2, 1, 1]
    """
    if not moves:
        return []
    src, dst = [t.src_rank for t in moves], [t.dst_rank for t in moves]
    n = int(max(np.bincount(src).max(), np.bincount(dst).max()))
    out, into = [[-1] * n for _ in range(ranks)], [[-1] * n for _ in range(ranks)]     # rank, colour -> move
    for i in range(len(moves)):
        a, b = out[src[i]].index(-1), into[dst[i]].index(-1)
        if into[dst[i]][a] != -1:
            _flip(dst[i], a, b, src, dst, out, into)
        out[src[i]][a] = into[dst[i]][a] = i
    rounds = [tuple(moves[i] for row in out if (i := row[c]) != -1) for c in range(n)]
    return sorted(rounds, key=len, reverse=True)


def _flip(receiver: int, a: int, b: int, src: list[int], dst: list[int], out: list[list[int]],
          into: list[list[int]]) -> None:
    """Exchange the colours a and b on the path that leaves `receiver` by a.  It never meets the sender that lacks a."""
    path, at, side, c = [], receiver, into, a
    while (i := side[at][c]) != -1:
        path.append((i, c))
        at, side = (src[i], out) if side is into else (dst[i], into)
        c = b if c == a else a
    for i, c in path:
        out[src[i]][c] = into[dst[i]][c] = -1
    for i, c in path:
        d = b if c == a else a
        out[src[i]][d] = into[dst[i]][d] = i


def _starts(seconds: Sequence[float], ends: Sequence[int], params: Params) -> tuple[int, ...]:
    """The step of each round: rounds share a step while the links have time, and never with the wave before theirs."""
    window = params.step_seconds * params.link_share
    starts, step, used = [], 0, 0.0
    for i, s in enumerate(seconds):
        if starts and (i in ends or used + s > window or window <= 0):
            step, used = step + max(1, math.ceil(used / window - 1e-9) if window > 0 else 1), 0.0
        starts.append(step)
        used += s
    return tuple(starts)


def stages(rounds: Sequence[Round], commits: Sequence[Sequence[int]]) -> list[tuple[Transfer, ...]]:
    """For each round the transfers whose experts take their slots after it: all that are staged for the layers then."""
    staged: dict[int, list[Transfer]] = {}
    out = []
    for r, layers in zip(rounds, commits, strict=True):
        for t in r:
            staged.setdefault(t.layer, []).append(t)
        out.append(tuple(t for x in layers for t in staged.pop(x, ())))
    return out
