"""Which replica a token goes to: tables from logical to physical experts that split every expert's load evenly.

The planner counts on an even split.  Taking replicas in turn by the token's place among those of its own rank that
chose the same expert makes it exact per rank, however routing looks; what is left over (fewer tokens than replicas)
starts at another replica on every rank and for every expert, so that it does not pile up on the first.  The start of a
rank is the sum of its mesh coordinates: if an axis is idle but for a part of its ranks, the others still spread.
"""

from typing import NamedTuple

import numpy as np

from afl.dist.eplb.values import Placement
from afl.errors import BalanceError, violations


class Routes(NamedTuple):
    """The replicas of every expert, as tensors that a step takes as input; a function of the placement alone."""

    phys: np.ndarray                    # int32 [layers, experts, most], ascending slots, the first one repeated behind
    count: np.ndarray                   # int32 [layers, experts], replicas


def routes(placement: Placement, experts: int, most: int = 0) -> Routes:
    """The tables of a placement.

    `most`: columns, at least the largest number of replicas (0: just that many), so that a new placement keeps the
    shape.  Raises `BalanceError` if the placement is invalid or has more replicas than columns.

    >>> r = routes(Placement([[0, 1, 2, 0]], 2), 3)
    >>> r.phys.tolist(), r.count.tolist()
    ([[[0, 3], [1, 1], [2, 2]]], [[2, 1, 1]])
    """
    bad = placement.check(experts)
    if bad:
        raise BalanceError(violations("routing tables", bad))
    phys = placement.log_to_phys(experts)
    width = phys.shape[2]
    if most and width > most:
        raise BalanceError(f"routing tables: an expert has {width} replicas, the tables have {most} columns")
    wide = np.concatenate([phys, np.full((*phys.shape[:2], max(most - width, 0)), -1, np.int32)], 2)
    wide = np.where(wide < 0, wide[..., :1], wide)
    return Routes(np.ascontiguousarray(wide, np.int32), placement.counts(experts).astype(np.int32))


def turns(chosen: np.ndarray, live: np.ndarray | None = None) -> np.ndarray:
    """int64 [tokens, k]: how many earlier choices of this rank went to the same expert; -1 for padding rows.

    `chosen`: int [tokens, k], logical; `live`: bool [tokens].  On a device it falls out of the stable sort by expert
    that dispatch does anyway.

    >>> turns(np.array([[0, 2], [2, 1], [0, 2]])).tolist()
    [[0, 0], [1, 0], [1, 2]]
    """
    flat = chosen.reshape(-1)
    counted = np.ones(len(flat), bool) if live is None else np.repeat(live, chosen.shape[1])
    out = np.full(len(flat), -1, np.int64)
    at = np.flatnonzero(counted)
    order = at[np.argsort(flat[at], kind="stable")]
    e = flat[order]
    out[order] = np.arange(len(e)) - np.searchsorted(e, e)
    return out.reshape(chosen.shape)


def choose(r: Routes, layer: int, chosen: np.ndarray, source: int, live: np.ndarray | None = None) -> np.ndarray:
    """int32 [tokens, k]: physical slots for the logical experts `chosen`, -1 for padding rows.

    `source`: the sum of the sending rank's mesh coordinates (`tp` + `dp`).  Every replica of an expert gets the same
    number of this rank's tokens, give or take one.
    """
    turn = turns(chosen, live)
    at = (turn + source + chosen) % r.count[layer, chosen]
    return np.where(turn < 0, -1, r.phys[layer, chosen, at]).astype(np.int32)


def table(r: Routes, layer: int, rows: int) -> np.ndarray:
    """int32 [rows, experts]: the slot for turn or token `row`, for kernels that take a periodic table.

    Row t is read at (t + source) mod rows.  In any as many consecutive rows as an expert has replicas each occurs once;
    where `rows` is no multiple of that number, the step from the last row to the first one is off by one.

    >>> table(routes(Placement([[0, 1, 2, 0]], 2), 3), 0, 3).tolist()
    [[0, 1, 2], [3, 1, 2], [0, 1, 2]]
    """
    experts = np.arange(r.count.shape[1])
    at = (np.arange(rows)[:, None] + experts) % r.count[layer]
    return np.ascontiguousarray(r.phys[layer, experts, at], np.int32)
