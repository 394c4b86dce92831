"""The block pool, names, hits, and what the prefix cache gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_fakes import Run, expect_alone

from afl.errors import ConfigError
from afl.sched import Arrived, GroupSpec, Loaded, Policy, Request, Reset, Sampled, SchedConfig, init, metrics, step
from afl.sched.groups import granularity
from afl.sched.hashing import extend, root
from afl.sched.hits import longest
from afl.sched.pool import BlockPool


def cached(**more):
    return SchedConfig(4, 64, 64, 40, 4, prefix_cache=True, **more)


def grants(run, id):
    return [(int(p.start[i]), int(p.grant[i])) for p in run.plans for i in np.flatnonzero(p.ids == id)]


def test_free_blocks_come_in_the_order_of_the_specification():
    """2.1: A holds 1, 2, 3, the first two named; after A the order is 3, 4, 5, 2, 1."""
    ids, pool = BlockPool.of(5).take(3)
    pool = pool.name([(1, b"x"), (2, b"y")], 1)
    pool = pool.drop(ids[::-1])
    assert pool.ids() == [3, 4, 5, 2, 1]
    taken, pool = pool.take(3)
    assert taken.tolist() == [3, 4, 5] and len(pool.blocks) == 2
    taken, pool = pool.take(1)
    assert taken.tolist() == [2] and list(pool.blocks) == [b"x"] and pool.evictions == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "drop", "hold", "name"]), st.integers(0, 9)), max_size=40))
def test_the_pool_equals_plain_lists(ops):
    pool, free, refs, names, old = BlockPool.of(6), [1, 2, 3, 4, 5, 6], {}, {}, []
    for op, x in ops:
        old.append((pool, list(free), dict(names)))
        held = sorted(refs)
        if op == "take":
            n = x % (len(free) + 1)
            ids, pool = pool.take(n)
            assert ids.tolist() == free[:n]
            for b in free[:n]:
                refs[b] = 1
                names.pop(b, None)
            free = free[n:]
        elif op == "drop" and held:
            b = held[x % len(held)]
            pool = pool.drop([b])
            refs[b] -= 1
            if not refs[b]:
                del refs[b]
                free.insert(len(free) if b in names else 0, b)
        elif op == "hold" and (held or names):
            b = sorted({*held, *names})[x % len({*held, *names})]
            pool = pool.hold([b, b])
            refs[b] = refs.get(b, 0) + 2
            free = [f for f in free if f != b]
        elif op == "name" and held:
            b, key = held[x % len(held)], bytes([x])
            if key not in names.values() and b not in names:
                names[b] = key
            pool = pool.name([(b, key)], 1)
        assert pool.ids() == free and {b: k for k, b in pool.blocks.items()} == names
    for was, ids, known in old:                                            # old versions stay valid
        assert was.ids() == ids and {b: k for k, b in was.blocks.items()} == known


def test_a01_a_full_prompt_computes_at_least_one_token():
    run = Run(cached())
    for n, prompt in enumerate([list(range(8)), list(range(8)), list(range(10)), list(range(10))]):
        run.submit(Request(str(n), prompt, 3))
        run.drain()
    assert [grants(run, str(n))[0] for n in range(4)] == [(0, 8), (4, 4), (8, 2), (8, 2)]
    assert run.result("0") == run.result("1") and run.result("2") == run.result("3")


def test_a16_the_first_prompt_has_zero_hits_and_says_so():
    run = Run(cached())
    run.submit(Request("a", range(9), 2))
    m = metrics(run.drain().state)
    assert (m["prefix_hit_tokens"], m["prefix_queried_tokens"]) == (0, 9)


def test_the_worked_trace_with_a_prefix_cache():
    """1.13 with 6 usable blocks: the preempted request finds 8 of its 9 tokens again."""
    run = Run(SchedConfig(4, 8, 16, 6, 4, prefix_cache=True))
    requests = [Request("r1", range(10), 6), Request("r2", range(20, 26), 4)]
    plan = run.submit(*requests)
    lines = []
    while plan is not None:
        lines.append(dict(zip(plan.ids, plan.grant.tolist(), strict=True)))
        plan = run.step()
    both = {"r1": 1, "r2": 1}
    assert lines == [{"r1": 8}, {"r1": 2, "r2": 6}, both, both, {"r1": 1}, {"r1": 1}, {"r1": 1}, {"r2": 1}]
    s = run.state
    assert (s.preemptions, s.recomputed, s.refound, s.hits) == (1, 0, 8, 0)          # A15: no prefix hit
    expect_alone(run, requests)


def test_three_samples_of_one_prompt_compute_it_once():
    run = Run(cached())
    requests = [Request(str(i), range(12), 4, stop_ids=(i,)) for i in range(3)]
    plan = run.submit(*requests)
    assert plan.grant.tolist() == [12, 4, 4]
    expect_alone(run.drain(), requests)


def test_a18_a_compressed_group_hits_only_whole_blocks():
    config = SchedConfig(4, 64, 64, 80, 4, (GroupSpec(block_tokens=4), GroupSpec(block_tokens=16)), prefix_cache=True)
    assert config.granularity == 16
    run = Run(config)
    first = list(range(16)) + [3, 5]
    for n, prompt in enumerate([first, first[:8] + [9] * 10, first[:16] + [7, 7, 7]]):
        run.submit(Request(str(n), prompt, 2))
        run.drain()
    assert [grants(run, str(n))[0][0] for n in range(3)] == [0, 0, 16]


def test_a17_the_granularity_is_stated():
    sizes = (128, 4096, 32, 2, 8)
    assert granularity([GroupSpec(block_tokens=n) for n in sizes]) == 4096
    assert SchedConfig(1, 1, 8192, 9999, 1, tuple(GroupSpec(block_tokens=n) for n in sizes)).granularity == 4096


def test_a_hybrid_model_hits_on_a_short_prompt():
    config = SchedConfig(4, 64, 64, 80, 4, (GroupSpec(), GroupSpec("recurrent")), prefix_cache=True)
    run = Run(config)
    for n in range(2):
        run.submit(Request(str(n), range(10), 3))
        run.drain()
    assert grants(run, "0")[:2] == [(0, 8), (8, 2)] and grants(run, "1")[0] == (8, 2)
    assert run.result("0") == run.result("1")
    assert all(n > 0 for n in metrics(run.state)["prefix_hit_blocks"].values())


def test_a_junction_makes_the_third_request_hit():
    """The state at the end of a shared prefix is kept once somebody was seen to need it."""
    config = SchedConfig(4, 64, 64, 99, 4, (GroupSpec(), GroupSpec("recurrent")), prefix_cache=True)
    run, shared = Run(config), list(range(10, 18))
    for n in range(3):
        run.submit(Request(str(n), shared + [n] * 9, 2))
        run.drain()
    assert [grants(run, str(n))[0][0] for n in range(3)] == [0, 0, 8]
    assert grants(run, "1")[0] == (0, 8), "its first chunk ends at the junction"


def test_a_window_gives_blocks_back_only_when_no_step_in_flight_reads_them():
    """A04: with window w a block goes when all its positions are below computed - in flight - w + 1."""
    config = SchedConfig(1, 8, 64, 30, 2, (GroupSpec("window", window=5),))
    for depth in (1, 2, 3):
        run = Run(config, depth)
        requests = [Request("a", range(20), 20)]
        run.submit(*requests)
        seen = []
        while run.state.busy:
            for plan in run.state.inflight:
                for i, row in enumerate(plan.rows):
                    low = max(0, int(plan.start[i]) - 4) // 2
                    mine = plan.blocks[0][i][low:]
                    held = run.state.blocks_of(row)[0]
                    assert (held[low : len(mine) + low] == mine).all(), "a block that a step in flight reads was freed"
            seen.append(int(run.state.held.max()))
            run.step()
        expect_alone(run, requests)
        assert max(seen[8:-1]) <= config.most(40)[0] < 20


def test_a21_domains_have_names_of_their_own():
    tokens = np.arange(4, dtype=np.int32)
    names = [extend((), lambda r=r: r, tokens, 4)[0] for r in (
        root(), root(adapter="x"), root(salt="x"), root(adapter="x", adapter_version=1), root(weights=1))]
    names += [extend((), root, tokens, 4, [(1, 2, c)])[0] for c in ("cat", "dog")]
    names += [extend((), root, tokens, 4, [(2, 2, "cat")])[0]]
    assert len(set(names)) == len(names)
    run = Run(cached())
    kinds = [{}, {"salt": "x"}, {"adapter": "x"}, {"adapter": "x", "adapter_version": 2}, {"items": [(1, 3, "cat")]}]
    for n, kind in enumerate(kinds * 2):
        run.submit(Request(str(n), range(9), 2, **kind))
        run.drain()
    assert [grants(run, str(n))[0][0] for n in range(10)] == [0] * 5 + [8] * 5


def test_a22_new_weights_find_nothing_and_give_no_names_to_what_was_begun_before():
    run = Run(cached())
    run.submit(Request("a", range(9), 2))
    run.drain()
    run.submit(Request("old", range(9), 30))
    run.step(Reset(weights=1))
    for _ in range(12):
        run.step()
        assert not len(run.state.pool.blocks), "what was begun under the old weights must not be found"
    run.submit(Request("b", range(9), 2))
    run.drain()
    run.submit(Request("c", range(9), 2))
    run.drain()
    assert grants(run, "old")[0][0] == 8 and grants(run, "b")[0][0] == 0 and grants(run, "c")[0][0] == 8


def test_g10_only_known_tokens_are_named():
    """With drafts and three plans in flight, every named block holds tokens that the request really has."""
    config = SchedConfig(2, 32, 64, 40, 2, prefix_cache=True, drafts=3)
    run = Run(config, 3, luck=0.3)
    request = Request("a", range(5), 40)
    run.submit(request)
    while run.state.busy:
        run.step()
        for row in run.state.running:
            full = int(run.state.hashed[row])
            tokens = run.state.tokens[row]
            assert full * 2 <= len(tokens) and run.state.chain[row][:full] == extend((), root, tokens, 2)[:full]
    expect_alone(run, [request])
    assert 0 < run.state.accepted < run.state.drafted


def brute(known, groups, unit, length):
    """Whether every group has what `length` cached tokens need."""
    for g, spec in enumerate(groups):
        size = spec.block_tokens
        if length % size:
            return False
        window = max(0, length - spec.window + 1) // size
        low = {"full": 0, "window": window, "recurrent": length // size - 1}[spec.kind]
        if any((g, i) not in known for i in range(max(low, 0), length // size)):
            return False
    return True


KINDS = [GroupSpec(block_tokens=2), GroupSpec(block_tokens=4), GroupSpec("window", 2, 5), GroupSpec("window", 4, 1),
         GroupSpec("recurrent", 4), GroupSpec("recurrent", 2), GroupSpec("window", 2, 9)]


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_hit_equals_brute_force(seed):
    for case in range(20):
        one_hit(np.random.default_rng((seed, case)))


def one_hit(rng):
    groups = [KINDS[i] for i in rng.integers(0, len(KINDS), rng.integers(1, 4))]
    chain, pool, known = extend((), root, np.arange(24, dtype=np.int32), 2), BlockPool.of(80), set()
    taken, pool = pool.take(80)
    free = iter(taken.tolist())
    for g, spec in enumerate(groups):
        for i in range(24 // spec.block_tokens):
            if rng.random() < 0.7:
                name = chain[(i + 1) * spec.block_tokens // 2 - 1]
                pool = pool.name([(next(free), name + (bytes([g]) if g else b""))], 1)
                known.add((g, i))
    cap = int(rng.integers(12, 25))
    hit = longest(pool, groups, chain, 2, cap, 2)
    assert hit.tokens == max((n for n in range(0, cap + 1, 2) if n == 0 or brute(known, groups, 2, n)), default=0)


def test_a20_tables_are_as_wide_as_the_longest_request_with_drafts():
    config = SchedConfig(1, 64, 64, 40, 16, drafts=2)
    run = Run(config, 2)
    request = Request("a", range(30), 60)
    run.submit(request)
    expect_alone(run.drain(), [request])
    assert config.width == 4 and max(p.kv_len.max() for p in run.plans) <= 63


def test_drafts_and_recurrent_groups_are_refused_together():
    with pytest.raises(ConfigError, match="state per draft token"):
        SchedConfig(1, 4, 16, 8, 4, (GroupSpec("recurrent"),), drafts=1)


def test_d07_the_caller_may_reuse_its_arrays():
    prompt, tokens = np.arange(5, dtype=np.int32), np.array([3], np.int32)
    s, plan, _ = step(init(SchedConfig(1, 8, 16, 8, 4)), [Arrived(Request("a", prompt, 3))], Policy())
    prompt[:] = 0
    event = Sampled(plan.step, tokens)
    tokens[:] = 9
    s, _, out = step(s, [event], Policy())
    assert out.tokens.tolist() == [3] and s.tokens[0].tolist() == [0, 1, 2, 3, 4, 3]


def test_a_state_between_two_block_ends_is_not_taken_for_that_of_the_end():
    """A chunk ends at 3 since the step was full, the next could reach 8: it must not pass 4, where a state is named."""
    config = SchedConfig(2, 6, 30, 40, 4, (GroupSpec(), GroupSpec("recurrent")), prefix_cache=True)
    run = Run(config)
    first = Request("first", [1] * 3, 1)
    run.submit(first, Request("a", [3] * 14, 2))              # "a" gets 3 tokens beside the 3 of the other
    run.drain()
    starts = [(int(p.start[i]), int(p.grant[i])) for p in run.plans for i, id in enumerate(p.ids) if id == "a"]
    assert starts[:3] == [(0, 3), (3, 1), (4, 4)]
    again = Request("b", [3] * 6, 3)
    run.submit(again)
    run.drain()
    expect_alone(run, [first, Request("a", [3] * 14, 2), again])


def test_a_loaded_state_between_two_block_ends_is_not_taken_for_that_of_the_end():
    config = SchedConfig(1, 3, 9, 8, 2, (GroupSpec(), GroupSpec("recurrent")), prefix_cache=True)
    run = Run(config)
    run.submit(Request("far", [3] * 8, 1, remote=5))
    load = run.loads[0]
    run.device.load(load, [3] * 8, run.state.config.groups)
    run.step(Loaded("far", 5))
    run.drain()
    again = Request("again", [3] * 7, 1)
    run.submit(again)
    run.drain()
    expect_alone(run, [again])
