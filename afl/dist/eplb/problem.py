"""What every policy does before and after its own work: check the operands, keep slots of experts that stay."""

import numpy as np

from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology
from afl.errors import BalanceError, violations


def require(load: LoadWindow, now: Placement, topology: Topology, params: Params) -> None:
    """Raise `BalanceError` with all reasons why these do not belong together."""
    bad = [f"{name}: the placement has {p}, the {other} {o}" for name, other, p, o in (
        ("layers", "load", now.layers, load.layers), ("ranks", "topology", now.ranks, topology.ranks)) if p != o]
    filled = int((now.phys_to_log >= 0).sum(1).min()) if now.layers else 0
    if filled < load.experts:
        bad.append(f"more experts than slots: {load.experts} experts, {filled} slots")
    else:
        bad += now.check(load.experts)
    bad += [f"pinned slot {p} does not exist (layer, rank, slot; {now.layers} x {now.ranks} x {now.slots_per_rank})"
            for p in sorted(params.pinned)
            if not all(0 <= i < n for i, n in zip(p, (now.layers, now.ranks, now.slots_per_rank), strict=True))]
    if bad:
        raise BalanceError(violations("nothing can be planned", bad))


def sizes(now: np.ndarray) -> np.ndarray:
    """int64 [ranks]: slots that exist, of a layer's placement [ranks, slots per rank]."""
    return (now >= 0).sum(1)


def settle(held: np.ndarray, now: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """int32 [ranks, slots per rank] with the experts of `held` bool [ranks, experts].

    An expert that was on the rank keeps its slot; the others fill the remaining slots in `order`, a permutation of the
    experts (ascending if None).  Holes stay.
    """
    order = np.arange(held.shape[1]) if order is None else order
    rank = np.arange(len(now))[:, None]
    stay = (now >= 0) & held[rank, now]
    out = np.where(stay, now, -1).astype(np.int32)
    new = held & ~held_of(out, held.shape[1])
    out[(now >= 0) & ~stay] = order[np.nonzero(new[:, order])[1]]
    return out


def relabel(held: np.ndarray, now: np.ndarray) -> np.ndarray:
    """`held` bool [ranks, experts] with its rows given to the ranks that already hold most of them (Hungarian method).

    Only ranks of equal size exchange rows.
    """
    from scipy.optimize import linear_sum_assignment

    match = (held.T[now] & (now >= 0)[:, :, None]).sum(1)                   # [ranks, rows]: experts in common
    size = sizes(now)
    match[size[:, None] != size[None, :]] = -1 - held.shape[1]
    row, col = linear_sum_assignment(match, maximize=True)
    out = np.empty_like(held)
    out[row] = held[col]
    return out


def held_of(now: np.ndarray, experts: int) -> np.ndarray:
    """bool [ranks, experts]: who holds what, of a layer's placement [ranks, slots per rank]."""
    held = np.zeros((len(now), experts), np.bool_)
    r, s = np.nonzero(now >= 0)
    held[r, now[r, s]] = True
    return held
