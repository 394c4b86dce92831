"""Values of the expert balancer: where experts are, what the links carry, what shall move, and what a planner may do.

A placement is rank-major: rank r owns the slots r*S ... r*S + S - 1 with S = ceil(slots / ranks).  A slot that holds -1
is a hole: it stands for memory that does not exist (ranks of unequal size), is never filled and never routed to.
"""

from typing import Any, NamedTuple

import attrs
import numpy as np

from afl.dist.eplb.load import LoadWindow
from afl.errors import BalanceError, violations

__all__ = ["Links", "LoadWindow", "Params", "Placement", "Plan", "Round", "Topology", "Transfer"]


@attrs.frozen(eq=False)
class Placement:
    """The expert in every physical slot.

    >>> p = Placement.initial(layers=1, experts=3, slots=5, ranks=2)
    >>> p.by_rank.tolist(), p.counts(3).tolist()
    ([[[0, 1, 2], [0, 1, -1]]], [[2, 2, 1]])
    """

    phys_to_log: np.ndarray             # int32 [layers, slots], rank-major, -1 = hole; padded to ranks * slots_per_rank
    ranks: int

    def __init__(self, phys_to_log: Any, ranks: int) -> None:
        x = np.asarray(phys_to_log)
        if x.ndim != 2 or x.dtype.kind not in "iu" or x.shape[1] == 0 or ranks < 1:
            raise BalanceError(f"a placement must be integers [layers, slots] over at least one rank, "
                               f"got {x.dtype} {list(x.shape)} over {ranks}")
        short = -x.shape[1] % ranks
        x = np.concatenate([x, np.full((len(x), short), -1, x.dtype)], 1).astype(np.int32)
        x.flags.writeable = False
        self.__attrs_init__(x, ranks)  # type: ignore[attr-defined]

    @classmethod
    def initial(cls, layers: int, experts: int, slots: int, ranks: int) -> "Placement":
        """Experts 0, 1, ..., then copies of 0, 1, ... in slot order; the first slots mod ranks ranks own one slot more.

        Raises `BalanceError` when the slots cannot hold every expert, or only with two copies on one rank.
        """
        bad = [f"{n} must be at least 1, got {v}" for n, v in
               (("layers", layers), ("experts", experts), ("ranks", ranks)) if v < 1]
        if not bad and slots < experts:
            bad.append(f"{slots} slots cannot hold {experts} experts; give at least {experts} slots")
        if not bad and -(-slots // ranks) > experts:
            bad.append(f"{slots} slots over {ranks} ranks: a rank owns {-(-slots // ranks)} slots but there are only "
                       f"{experts} experts; give at most {ranks * experts} slots")
        if bad:
            raise BalanceError(violations("placement", bad))
        size, longer = -(-slots // ranks), slots % ranks or ranks
        row = np.full((ranks, size), -1, np.int32)
        real = np.ones((ranks, size), bool)
        real[longer:, -1] = False
        row[real] = np.arange(slots) % experts
        return cls(np.broadcast_to(row.reshape(-1), (layers, row.size)), ranks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.ranks == other.ranks and np.array_equal(
            self.phys_to_log, other.phys_to_log)

    def __hash__(self) -> int:
        return hash((self.ranks, self.phys_to_log.shape, self.phys_to_log.tobytes()))

    @property
    def layers(self) -> int:
        return self.phys_to_log.shape[0]

    @property
    def slots(self) -> int:
        """Slots of a layer, holes included: ranks * slots_per_rank."""
        return self.phys_to_log.shape[1]

    @property
    def slots_per_rank(self) -> int:
        return self.slots // self.ranks

    @property
    def by_rank(self) -> np.ndarray:
        """int32 [layers, ranks, slots per rank]: the same slots, seen per rank."""
        return self.phys_to_log.reshape(self.layers, self.ranks, -1)

    def counts(self, experts: int) -> np.ndarray:
        """int64 [layers, experts]: replicas of each expert."""
        n = np.zeros((self.layers, experts), np.int64)
        layer, slot = np.nonzero(self.phys_to_log >= 0)
        np.add.at(n, (layer, self.phys_to_log[layer, slot]), 1)
        return n

    def log_to_phys(self, experts: int) -> np.ndarray:
        """int32 [layers, experts, most replicas]: the slots of each expert, ascending, then -1."""
        width = max(int(self.counts(experts).max()), 1)
        out = np.full((self.layers, experts, width), -1, np.int32)
        for layer, row in enumerate(self.phys_to_log):
            order = np.argsort(row, kind="stable")
            order = order[row[order] >= 0]
            e = row[order]
            out[layer, e, np.arange(len(e)) - np.searchsorted(e, e)] = order
        return out

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """The ranks that hold an expert, ascending."""
        slots = np.flatnonzero(self.phys_to_log[layer] == expert)
        return tuple(int(r) for r in np.unique(slots // self.slots_per_rank))

    def check(self, experts: int) -> list[str]:
        """All violations as sentences: ids out of range, experts that are nowhere, experts twice on a rank."""
        bad = []
        for layer, ranks in enumerate(self.by_rank):
            outside = (ranks < -1) | (ranks >= experts)
            bad += [f"layer {layer}, rank {r}, slot {s}: expert {ranks[r, s]} is not in 0..{experts - 1}"
                    for r, s in np.argwhere(outside)]
            held = np.zeros((self.ranks, experts), np.int64)
            r, s = np.nonzero(~outside & (ranks >= 0))
            np.add.at(held, (r, ranks[r, s]), 1)
            absent = np.flatnonzero(held.sum(0) == 0)
            if len(absent):
                some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
                bad.append(f"layer {layer}: {len(absent)} experts are on no rank: {some}")
            bad += [f"layer {layer}, rank {r}: holds expert {e} {held[r, e]} times" for r, e in np.argwhere(held > 1)]
        return bad


class Links(NamedTuple):
    """Bytes per second between two ranks, by how near they are."""

    same_die: float = 400e9
    same_node: float = 150e9
    cross_node: float = 25e9


LINKS = Links()


def _ints(x: Any) -> np.ndarray:
    a = np.array(x, np.int32)
    a.flags.writeable = False
    return a


@attrs.frozen(eq=False)
class Topology:
    """Where the ranks are: node and die pair of each, and what the links carry.

    >>> t = Topology.regular(8, ranks_per_node=4)
    >>> t.bytes_per_s_between(0, 1), t.bytes_per_s_between(0, 2), t.bytes_per_s_between(0, 4)
    (400000000000.0, 150000000000.0, 25000000000.0)
    """

    ranks: int
    node: np.ndarray = attrs.field(converter=_ints)             # int32 [ranks]
    die_pair: np.ndarray = attrs.field(converter=_ints)         # int32 [ranks]; equal = two dies of one package
    bytes_per_s: Links = LINKS

    def __attrs_post_init__(self) -> None:
        bad = [f"{n} must give one number per rank, got {list(x.shape)} for {self.ranks} ranks"
               for n, x in (("node", self.node), ("die_pair", self.die_pair)) if x.shape != (self.ranks,)]
        bad += [f"bytes_per_s.{n} must be above 0, got {v}"
                for n, v in self.bytes_per_s._asdict().items() if not 0 < v < np.inf]
        if self.ranks < 1:
            bad.append(f"ranks must be at least 1, got {self.ranks}")
        if bad:
            raise BalanceError(violations("topology", bad))

    @classmethod
    def regular(cls, ranks: int, *, ranks_per_node: int = 16, bytes_per_s: Links = LINKS) -> "Topology":
        """Nodes of equal size filled in rank order, two dies to a package."""
        r = np.arange(ranks)
        return cls(ranks, r // max(ranks_per_node, 1), r // 2, bytes_per_s)

    def bytes_per_s_between(self, a: int, b: int) -> float:
        """Bytes per second from rank a to rank b."""
        if self.node[a] != self.node[b]:
            return self.bytes_per_s.cross_node
        return self.bytes_per_s.same_die if self.die_pair[a] == self.die_pair[b] else self.bytes_per_s.same_node


class Transfer(NamedTuple):
    """Copy one expert's weights from a slot of a rank into a slot of another; slots count within the rank."""

    layer: int
    expert: int
    src_rank: int
    src_slot: int
    dst_rank: int
    dst_slot: int


Round = tuple[Transfer, ...]            # each rank sends at most one and receives at most one


@attrs.frozen(eq=False)
class Plan:
    """A new placement, how to get there, and what that is expected to bring."""

    placement: Placement
    rounds: tuple[Round, ...]
    par_before: np.ndarray              # float64 [layers], peak over average of the ranks' forecast loads
    par_after: np.ndarray               # float64 [layers]
    bytes: int                          # over all links
    seconds: float                      # of all rounds, none of it hidden
    gain_seconds: float                 # expected over the horizon
    reasons: tuple[str, ...] = ()       # one per layer: why it changes, or why not
    commits: tuple[tuple[int, ...], ...] = ()   # one per round: layers whose staged experts take their slots after it
    starts: tuple[int, ...] = ()        # one per round: the step, from 0, in which it may start


@attrs.frozen
class Params:
    """What a planner may do and aims at."""

    z: float = 0.67                     # standard deviations in the risk of a rank's load; 0 = mean only
    tol: float = 0.01                   # a layer whose peak is within this of the average is left alone
    gate: float = 0.01                  # a layer changes only if its peak over average falls by more than this
    max_move_frac: float = 0.25         # moves per layer and plan, as a part of its slots
    bytes_per_expert: int = 44_040_192  # int8 weights of one expert at d 7168, f 2048
    step_seconds: float = 0.05
    horizon_steps: int = 3000           # steps for which a new placement is expected to stay
    pinned: frozenset[tuple[int, int, int]] = attrs.field(default=frozenset(), converter=frozenset)  # layer, rank, slot
    forecaster: str = "backtest"        # or "mean", "ewma", ...: see forecast.py
    groups: int = 1                     # expert groups of group-limited routing (greedy)
    seed: int = 0                       # of the random policy
    staging: int = 0                    # experts that a rank can hold beside its slots; 0: what the busiest layer needs
    link_share: float = 0.5             # part of a step in which the links may carry transfers
    expert_share: float = 0.5           # part of a step that the experts take at the present imbalance

    def __attrs_post_init__(self) -> None:
        rules: tuple[tuple[str, float, float], ...] = (
            ("z", 0, 100), ("tol", 0, np.inf), ("gate", 0, np.inf), ("max_move_frac", 0, np.inf),
            ("bytes_per_expert", 0, np.inf), ("step_seconds", 0, np.inf), ("horizon_steps", 0, np.inf),
            ("groups", 1, np.inf), ("seed", 0, np.inf), ("staging", 0, np.inf), ("link_share", 1e-6, 1),
            ("expert_share", 0, 1))
        bad = [f"{n} must be a number of at least {low}{'' if high == np.inf else f' and at most {high:g}'}, got {v}"
               for n, low, high in rules if not (low <= (v := getattr(self, n)) <= high and v < np.inf)]
        if bad:
            raise BalanceError(violations("planner parameters", bad))
