"""Transfers and rounds, replayed slot by slot with labels that carry the expert's name."""

from collections import Counter

import numpy as np
import pytest
from arrangements import some_placement, some_sizes, some_topology
from replay import replay

from afl.dist.eplb.diff import apply, settle, sources, units, waits
from afl.dist.eplb.rounds import colour, schedule, stages
from afl.dist.eplb.values import Links, Params, Placement, Topology, Transfer
from afl.errors import BalanceError

SEEDS = range(60)


def case(seed, staging=None):
    rng = np.random.default_rng(seed)
    layers, experts, slots, ranks = some_sizes(rng)
    old, new = (some_placement(rng, layers, experts, slots, ranks) for _ in range(2))
    staging = int(rng.integers(0, 4)) if staging is None else staging
    params = Params(staging=staging, bytes_per_expert=int(rng.integers(1, 1 << 28)), step_seconds=0.01)
    return old, settle(old, new), new, experts, some_topology(rng, ranks), params


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_lead_to_the_new_placement_over_valid_ones(seed):
    old, new, _, experts, topology, params = case(seed)
    done = schedule(old, new, topology, params)
    busiest = int((old.by_rank != new.by_rank).sum(2).max())
    assert replay(old, done, experts, params.staging or busiest) == new
    assert sum(map(len, done.rounds)) == (old.phys_to_log != new.phys_to_log).sum()
    assert done.bytes == params.bytes_per_expert * sum(map(len, done.rounds))


@pytest.mark.parametrize("seed", SEEDS)
def test_one_staged_expert_per_rank_is_enough_after_settling(seed):
    old, new, _, experts, topology, params = case(seed, staging=1)
    assert replay(old, schedule(old, new, topology, params), experts, 1) == new


@pytest.mark.parametrize("seed", SEEDS)
def test_settling_keeps_ranks_experts_and_stayers_slots(seed):
    old, new, wanted, _, _, _ = case(seed)
    for before, after, want in zip(old.by_rank.reshape(-1, old.slots_per_rank),
                                   new.by_rank.reshape(-1, old.slots_per_rank),
                                   wanted.by_rank.reshape(-1, old.slots_per_rank), strict=True):
        assert sorted(after) == sorted(want)
        for e in set(before) & set(after) - {-1}:
            assert list(before).index(e) == list(after).index(e)
    assert settle(old, new) == new and settle(old, old) == old


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_limit_every_source_is_of_the_old_placement_and_a_layer_commits_once(seed):
    old, new, _, _, topology, params = case(seed, staging=0)
    done = schedule(old, new, topology, params)
    for t in (t for r in done.rounds for t in r):
        assert old.by_rank[t.layer, t.src_rank, t.src_slot] == t.expert
    changed = np.flatnonzero((old.phys_to_log != new.phys_to_log).any(1)).tolist()
    assert sorted(x for c in done.commits for x in c) == changed


@pytest.mark.parametrize("seed", range(200))
def test_colouring_takes_exactly_as_many_rounds_as_the_busiest_rank_has_transfers(seed):
    rng = np.random.default_rng(seed)
    ranks, n = int(rng.integers(2, 12)), int(rng.integers(0, 80))
    pairs = [p for p in rng.integers(0, ranks, (n, 2)).tolist() if p[0] != p[1]]
    moves = [Transfer(0, i, a, 0, b, 0) for i, (a, b) in enumerate(pairs)]
    rounds = colour(moves, ranks)
    assert sorted(t for r in rounds for t in r) == moves
    degree = max([0, *Counter(a for a, _ in pairs).values(), *Counter(b for _, b in pairs).values()])
    assert len(rounds) == degree
    for r in rounds:
        assert len({t.src_rank for t in r}) == len({t.dst_rank for t in r}) == len(r)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_layer_alone_takes_its_degree_and_together_never_more_than_one_after_the_other(seed):
    old, new, _, _, topology, params = case(seed, staging=0)
    total = 0
    for layer in range(old.layers):
        rows = old.phys_to_log.copy()
        rows[layer] = new.phys_to_log[layer]
        done = schedule(old, Placement(rows, old.ranks), topology, params)
        moves = [t for r in done.rounds for t in r]
        degree = max([0, *Counter(t.src_rank for t in moves).values(), *Counter(t.dst_rank for t in moves).values()])
        assert len(done.rounds) == degree
        total += degree
    assert len(schedule(old, new, topology, params).rounds) <= max(total, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_link_carries_more_in_a_step_than_its_cap(seed):
    old, new, _, _, topology, params = case(seed)
    done = schedule(old, new, topology, params)
    assert list(done.starts) == sorted(done.starts) and len(done.starts) == len(done.rounds)
    bounds = [*done.starts, 1 << 60]
    carried = Counter()
    for i, r in enumerate(done.rounds):
        following = next((b for b in bounds[i + 1:] if b > done.starts[i]), 1 << 60)
        for t in r:
            cap = topology.bytes_per_s_between(t.src_rank, t.dst_rank) * params.step_seconds * params.link_share
            spread = min(following - done.starts[i], -(-params.bytes_per_expert // int(cap)))
            carried[done.starts[i], t.src_rank, t.dst_rank] += params.bytes_per_expert / max(spread, 1)
            assert carried[done.starts[i], t.src_rank, t.dst_rank] <= cap * 1.0001
    waves = [i for i, c in enumerate(done.commits) if c]
    for i in waves[:-1]:
        assert done.starts[i + 1] > done.starts[i], "a wave starts in the step whose end commits the one before"


def test_short_rounds_share_a_step_and_long_ones_take_several():
    old, new = Placement([[0, 1, 2, 3, 4, 5]], 2), Placement([[3, 4, 5, 0, 1, 2]], 2)
    topology = Topology(2, [0, 0], [0, 1], Links(same_node=1e9))
    for size, starts in ((1_000_000, (0, 0, 0)), (4_000_000, (0, 0, 1)), (10_000_000, (0, 1, 2)),
                         (25_000_000, (0, 3, 6))):
        params = Params(bytes_per_expert=size, step_seconds=0.02, link_share=0.5)
        assert schedule(old, settle(old, new), topology, params).starts == starts, size


def test_the_sheets_example():
    old, new = Placement([[0, 1, 2, 3, 4, 5, 0, 1, 2]], 3), Placement([[5, 1, 4, 3, 4, 5, 0, 1, 2]], 3)
    assert settle(old, new) == new
    done = schedule(old, new, Topology.regular(3), Params())
    assert sorted(t for r in done.rounds for t in r) == [Transfer(0, 4, 1, 1, 0, 2), Transfer(0, 5, 1, 2, 0, 0)]
    assert len(done.rounds) == 2 and done.commits == ((), (0,))
    (two,) = stages(done.rounds, done.commits)[1:]
    assert apply(old, two) == new


def test_sources_are_near_and_share_the_work():
    # expert 0 on ranks 0, 1, 4; ranks 2, 3 are on the node of 0 and 1, ranks 5, 6, 7 on the one of 4
    now = Placement([[0, 0, 2, 3, 0, 5, 6, 7]], 8)
    topology = Topology(8, [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 4, 4, 5, 5])
    writes = [w for u in units(now, Placement([[0, 0, 0, 0, 0, 0, 0, 0]], 8), 0) for w in u.writes]
    found = {t.dst_rank: t.src_rank for t in sources(writes, now, topology)}
    assert sorted((found[2], found[3])) == [0, 1], "two on one node share"
    assert found[5] == found[6] == found[7] == 4, "the node's own holder before the other node's"
    alone = sources(writes[:1], now, topology, np.array([3, 1, 0, 0, 0, 0, 0, 0]))
    assert alone[0].src_rank == 1, "who sent less before breaks the tie"


def test_an_expert_never_disappears_between_commits():
    # each rank gives its two experts to the next one: rings over all ranks
    old = Placement([[0, 1, 2, 3, 4, 5]], 3)
    new = Placement([[2, 3, 4, 5, 0, 1]], 3)
    seen = []
    done = schedule(old, settle(old, new), Topology.regular(3), Params(staging=1))
    replay(old, done, 6, 1, lambda layers, p: seen.append(p))
    assert len(seen) == 2 and seen[-1] == settle(old, new)


def test_a_ring_through_one_rank_twice_is_refused_unless_settled():
    old, new = Placement([[0, 1, 2, 3]], 2), Placement([[2, 3, 1, 0]], 2)     # 0 <- 2 <- 1 <- 3 <- 0
    assert len(set(waits(old.phys_to_log[0], new.phys_to_log[0]))) == 4
    with pytest.raises(BalanceError, match="ring"):
        schedule(old, new, Topology.regular(2), Params(staging=1))
    assert schedule(old, new, Topology.regular(2), Params(staging=2)).rounds
    assert schedule(old, settle(old, new), Topology.regular(2), Params(staging=1)).rounds


@pytest.mark.parametrize(("new", "said"), [
    (Placement([[0, 1, 2]], 3), "different shape"),
    (Placement([[0, 1, 2, -1]], 2), "hole"),
    (Placement([[0, 1, 2, 2]], 2), "twice"),
])
def test_placements_that_do_not_fit_each_other_are_refused(new, said):
    with pytest.raises(BalanceError, match=said):
        settle(Placement([[0, 1, 2, 3]], 2), new)
