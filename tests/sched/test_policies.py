"""Each policy on a fixed seeded trace on which it beats first come, first served by a stated margin; composition."""

import itertools
import json
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from sched_fakes import Run, expect_alone
from sched_sim import ranks, serve

from afl.errors import ConfigError
from afl.sched import GroupSpec, Peers, Policy, Request, SchedConfig, Timed, init, policies
from afl.sched.cost import Figures, break_even_gbps, recompute_seconds, swap_seconds
from afl.sched.policies import compose, decode_first, get, profiling, recompute
from afl.sched.policies.growth import peak
from afl.sched.timing import Quad, clamp, fit, solve

FCFS = get("fcfs")


def trace(n, rate, seed, long=0.2, short=(16, 128), big=(2000, 6000), out=(16, 64)):
    """n requests, `rate` per second; a share `long` of them has long prompts."""
    rng, t, made = np.random.default_rng(seed), 0.0, []
    for i in range(n):
        t += rng.exponential(1 / rate)
        size = int(rng.integers(*(big if rng.random() < long else short)))
        made.append(Request(str(i), rng.integers(0, 9, size), int(rng.integers(*out)), arrival=t))
    return made


ROOMY = SchedConfig(8, 1024, 8192, 8000, 16)
TIGHT = SchedConfig(32, 1024, 2048, 300, 16)
BURST = dict(long=0, short=(64, 200), out=(50, 300))


def test_shortest_first_cuts_the_median_time_to_first_token_by_three_and_starves_nobody():
    requests = trace(150, 30, 1)
    first = [np.array(list(serve(ROOMY, p, requests).first.values())) for p in (FCFS, get("shortest"))]
    assert np.median(first[1]) * 3 < np.median(first[0])
    late = {r.id: len(r.prompt) * 1e-3 for r in requests}                 # overtaken for this long at most
    assert first[1].max() < first[0].max() + max(late.values())


def test_an_old_long_request_goes_before_a_young_short_one():
    run = Run(SchedConfig(1, 64, 64, 40, 4), policy=get("shortest", seconds_per_token=0.1))
    busy, old = Request("busy", [1], 3), Request("old", [1] * 20, 2, arrival=0.0)
    run.submit(busy, old, Request("soon", [2], 2, arrival=1.5), Request("late", [3], 2, arrival=2.5))
    order = [e[2] for e in run.state.queue.entries()]
    assert order == ["soon", "old", "late"]


def test_shortest_counts_what_the_cache_lacks():
    run = Run(SchedConfig(1, 64, 64, 40, 4, prefix_cache=True), policy=get("shortest"))
    run.submit(Request("warm", range(30), 2))
    run.drain()
    run.submit(Request("busy", [1], 2), Request("ten", [5] * 10, 2), Request("thirty", range(30), 2))
    assert [e[2] for e in run.state.queue.entries()] == ["thirty", "ten"]


def test_deadlines_are_met_half_as_often_again():
    due = [attrs.evolve(r, deadline=r.arrival + 0.3 + len(r.prompt) / 4000) for r in trace(150, 30, 2)]
    met = []
    for p in (FCFS, get("deadline", prefill_tokens_per_s=2e4)):
        served = serve(ROOMY, p, due)
        met.append(sum(served.first[r.id] + r.arrival <= r.deadline for r in due))
        assert len(served.done) == 150
    assert met[1] >= 1.5 * met[0]


def test_hopeless_requests_do_get_served():
    late = [Request(str(i), [1] * 50, 3, deadline=0.0001) for i in range(20)]
    assert len(serve(ROOMY, get("deadline"), late).done) == 20


def test_decode_first_cuts_the_slowest_tokens_by_three():
    requests = trace(100, 4, 3)
    policy = get("decode_first", prompt_tokens_beside_decodes=128)
    slow = [np.percentile(serve(ROOMY, p, requests).gaps, 99) for p in (FCFS, policy)]
    assert slow[1] * 3 < slow[0]


def test_prefill_first_cuts_the_median_time_to_first_token_by_a_third_where_decodes_fill_the_steps():
    config = SchedConfig(128, 64, 2048, 4000, 16)
    requests = trace(60, 100, 3, long=0, short=(16, 64), out=(100, 200))
    first = [np.median(list(serve(config, p, requests).first.values())) for p in (FCFS, get("prefill_first"))]
    assert first[1] < 0.67 * first[0], first


def test_urgent_requests_get_their_first_token_in_a_quarter_of_the_time():
    requests = [attrs.evolve(r, priority=0 if i % 10 == 0 else 1) for i, r in enumerate(trace(150, 30, 1))]
    urgent = []
    for p in (FCFS, get("priority")):
        served = serve(ROOMY, p, requests)
        urgent.append(np.median([served.first[r.id] for r in requests if r.priority == 0]))
        assert len(served.done) == 150
    assert urgent[1] < 0.25 * urgent[0], urgent


def test_prefill_first_never_mixes():
    requests = trace(60, 20, 3)
    served, prompt = serve(ROOMY, get("prefill_first"), requests), {r.id: len(r.prompt) for r in requests}
    for plan, _ in served.steps:
        decodes = plan.start >= [prompt[id] for id in plan.ids]
        assert decodes.all() or not decodes.any()
    assert len(served.done) == 60


@pytest.mark.parametrize("policy", [get("growth"), get("watermark", watermark=0.2)], ids=["growth", "watermark"])
def test_gates_prevent_preemptions(policy):
    requests = trace(100, 50, 4, **BURST)
    a, b = serve(TIGHT, FCFS, requests), serve(TIGHT, policy, requests)
    assert a.state.preemptions > 50
    assert b.state.preemptions <= (0 if "growth" in policy.admit else 0.5 * a.state.preemptions)
    assert len(b.done) == 100


def test_growth_counts_blocks_that_requests_share_once():
    """Each would come to 12 blocks of 4 tokens; 9 are shared, so 3 need 30 and not 36."""
    run = Run(SchedConfig(4, 64, 64, 30, 4, prefix_cache=True), policy=get("growth"))
    for name in "abc":
        run.submit(Request(name, range(40), 8, ignore_eos=True))
        run.step()
    assert {run.state.ids[r] for r in run.state.running} == set("abc")
    other = Run(SchedConfig(4, 64, 64, 30, 4, prefix_cache=True), policy=get("growth"))
    for i, name in enumerate("abc"):
        other.submit(Request(name, np.arange(40) + 50 * i, 8, ignore_eos=True))
        other.step()
    assert {other.state.ids[r] for r in other.state.running} == set("ab")


def test_a_victim_whose_prefix_others_keep_is_computed_again():
    """66 tokens cost 132 ms to compute and 34 ms to move; with 64 of them kept it is 4 ms against 34 ms."""
    params = dict(chip_flops=1e12, params=1e9, weight_bytes=0.0, kv_bytes=0.0, attention=0.0, descriptor_us=1000.0,
                  descriptors=1)
    for shared, want in ((True, "recompute"), (False, "swap")):
        policy = get("recompute", **params)
        run = Run(SchedConfig(4, 128, 128, 60, 4, prefix_cache=True, host_blocks=60), policy=policy)
        run.submit(Request("a", range(65), 8, ignore_eos=True))
        run.step()
        run.submit(Request("b", range(65) if shared else range(100, 165), 8, ignore_eos=True))
        run.step()
        row = run.state.tickets["b"].row
        assert recompute.action(run.state, row, {**recompute.DEFAULTS, **params}) == want


def test_growth_by_the_numbers():
    """16-token blocks, 60 + 10 and 64 + 20 tokens: 8 blocks now, 10 at step 5, 5 after the first has ended."""
    assert peak(np.array([60, 64]), np.array([10, 20]), 0, 16, 99) == 8
    assert peak(np.array([60, 64]), np.array([10, 20]), 11, 16, 99) == 10
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, left, bt = rng.integers(1, 50, 3), rng.integers(1, 30, 3), int(rng.integers(1, 9))
        brute = max(sum(-(-(x + t) // bt) for x, r in zip(n, left, strict=True) if r >= t) for t in range(41))
        assert peak(n, left, 40, bt, 99) == brute


def test_swapping_saves_engine_seconds_where_the_link_is_good():
    requests = trace(100, 50, 4, **BURST)
    config = attrs.evolve(TIGHT, host_blocks=600)
    a, b = (serve(config, p, requests, swap_ms=0.02) for p in (FCFS, get("recompute")))
    assert b.state.swaps > 20 and b.state.recomputed == 0 and b.seconds < 0.97 * a.seconds
    slow = serve(config, get("recompute", link_gbps=0.1), requests)
    assert slow.state.swaps == 0 and slow.state.preemptions > 20


# 4.3: params, kv bytes, layers x heads x channels, then at 4096 and 32768 tokens ms to compute and to move
COSTS = {
    "8B": (8e9, 131072, 32 * 32 * 128, 4.35, (264, 21), (3040, 168)),
    "32B": (32.8e9, 262144, 64 * 64 * 128, 2.1, (1080, 42), (12400, 336)),
    "7B MHA": (6.7e9, 524288, 32 * 32 * 128, 20.7, (224, 84), (2700, 672)),
}


@pytest.mark.parametrize("name", COSTS)
def test_cost_by_the_numbers_of_the_specification(name):
    """A2: 265 TF effective, link 64 GB/s at 80 %; products alone fill a quarter to all of the computing time."""
    params, kv, width, even, *rows = COSTS[name]
    f = Figures(2.65e14, 928.0, 51.2, params, 2.0, kv, attention=2 * width)
    assert abs(break_even_gbps(f) / even - 1) < 0.03
    for tokens, (compute, move) in zip((4096, 32768), rows, strict=True):
        assert abs(recompute_seconds(f, tokens, 0, 8192) * 1e3 / compute - 1) < 0.2
        assert abs(swap_seconds(f, tokens, 0, 0) * 1e3 / move - 1) < 0.03


def test_cost_of_both_ways():
    f = Figures(2.65e14, 928.0, 51.2, 8e9, 2.0, 131072.0, attention=262144.0)
    assert 0.24 < recompute_seconds(f, 4096, 0, 8192) < 0.28 and 0.020 < swap_seconds(f, 4096, 0, 32) < 0.022
    slow = attrs.evolve(f, descriptors=64, descriptor_us=5.0)           # 32 blocks x 32 layers x 2: 10 ms each way
    assert abs(swap_seconds(slow, 4096, 0, 32) - swap_seconds(f, 4096, 0, 32) - 2 * 0.01024) < 1e-9
    even = attrs.evolve(f, attention=0.0, memory_gbps=1e9, link_gbps=break_even_gbps(f))
    assert abs(recompute_seconds(even, 5000, 0, 8192) / swap_seconds(even, 5000, 0, 0) - 1) < 1e-9
    for n in (100, 1000):
        again = [recompute_seconds(f, *at, 512) for at in ((n + 1, 0), (n, 0), (n, 50))]
        assert again == sorted(again, reverse=True)
        assert swap_seconds(f, n + 1, 0, 9) > swap_seconds(f, n, 0, 9) > swap_seconds(f, n, 50, 9)


def queues(seed):
    """Four ranks; the first has half as many requests, four times as long."""
    rng = np.random.default_rng(seed)
    return [[Request(f"{k}.{i}", rng.integers(0, 9, int(rng.integers(100, 400) * (1 if k else 4))),
                     int(rng.integers(50, 100))) for i in range(40 if k else 20)] for k in range(4)]


def test_balance_levels_the_load_and_prompts_in_step_save_time():
    config = SchedConfig(16, 1024, 4096, 3000, 16)
    seconds, tokens, skew, _ = ranks(config, FCFS, queues(5))
    cap = ranks(config, get("balance"), queues(5))
    load = ranks(config, get("balance", balance="load", balance_slack=50), queues(5))
    assert cap[0] < 0.9 * seconds and load[2] - 1 < 0.5 * (skew - 1) and cap[1] == load[1] == tokens
    ranks(config, get("balance", balance="quota", balance_slack=2), queues(5))


def test_e12_e14_ranks_without_work_hold_nobody_up():
    one = [[Request("a", [1] * 20, 5)], [], [], []]
    for kind in ("any_at_cap", "quota", "load"):
        _, tokens, _, idle = ranks(SchedConfig(4, 32, 64, 40, 4), get("balance", balance=kind), one)
        assert tokens == 5 and idle >= 15


def test_any_rank_at_its_cap_stops_all():
    run = Run(SchedConfig(4, 64, 64, 40, 4), policy=get("balance"))
    run.step(Peers(1, (4, 1), (3, 3), (9, 9)))
    run.submit(Request("a", [1], 2))
    assert not run.plans and run.state.notes.rules == ("balance",)
    run.step(Peers(1, (3, 1), (3, 3), (9, 9)))
    assert run.plans


TRUE = Quad(1e-6, 0.01, 2.0)


def test_chunks_of_equal_time_by_the_numbers_of_the_specification():
    ms = TRUE.ms(0, 8192)
    assert abs(ms - 149.029) < 1e-3
    for start, exact, floor in ((0, 8192.0, 8192), (8192, 4781.8, 4736), (32768, 1923.9, 1920), (65536, 1048.6, 1024),
                                (131072, 546.5, 512)):
        x = solve(TRUE, start, ms)
        assert abs(x - exact) < 0.05 and clamp(x + 1e-6, 10**6, 10**6, 128) == floor
        assert abs(TRUE.ms(start, x) / ms - 1) < 1e-9
    assert abs(8192 + 0.8 * (solve(TRUE, 32768, ms) - 8192) - 3177.6) < 0.2      # what its smoothing makes of 1923.9
    assert solve(Quad(0.0, 0.02), 5000, 10.0) == 500 and solve(Quad(0.0, 0.0), 0, 1.0) == float("inf")
    xs = [solve(TRUE, s, ms) for s in range(0, 50000, 1000)]
    assert xs == sorted(xs, reverse=True) and solve(TRUE, 99, 20.0) < solve(TRUE, 99, 21.0)


@pytest.mark.parametrize("seed", range(8))
def test_profiling_keeps_chunks_level_under_noise(seed):
    """2 % noise, unit 16: true time of every chunk but the last within [0.93, 1.02] T, predicted never above T."""
    rng = np.random.default_rng(seed)
    rows = [((n * (n + 2 * start), n, 1.0), (TRUE.ms(start, n) + TRUE.c) * (1 + 0.02 * rng.standard_normal()))
            for start in (0, 16384, 65536) for n in np.linspace(1024, 8192, 22).astype(int).tolist()]
    fitted = fit(rows)
    whole, start, n, total, merged = TRUE.ms(0, 8192), 0, 0, 100_000, None
    while start < total:
        n = clamp(solve(fitted, start, whole), total - start, 8192, 16)
        if start + n == total:
            merged = TRUE.ms(start, n) / whole
        else:
            assert 0.93 <= TRUE.ms(start, n) / whole <= 1.02 and fitted.ms(start, n) <= whole * (1 + 1e-12)
        start += n
    assert merged <= 1.4, f"the tail took {merged:.2f} T"
    assert min(fitted.a, fitted.b, fitted.c) >= 0


def test_profiling_evens_out_the_steps_of_a_long_prompt():
    config = SchedConfig(1, 8192, 140_000, 10_000, 16)
    requests = [Request(str(k), np.zeros(130_000, int), 2) for k in range(2)]
    spread = []
    for policy in (FCFS, get("profiling", chunk_a=1e-6, chunk_b=0.01, chunk_unit=128),
                   get("profiling", chunk_ms=149.0, chunk_unit=16)):
        ms = [t for p, t in serve(config, policy, requests, Quad(1e-6, 0.01), noise=0.02).steps if p.grant[0] > 1]
        second = ms[len(ms) // 2 + 1 : -1]                                # what is learned is known by then
        spread.append(max(second) / min(second))
    assert spread[0] > 5 and spread[1] < 1.5 and spread[2] < 1.5


@pytest.mark.parametrize("constant", [0.0, 3.0, 20.0])
@pytest.mark.parametrize("true", [(1e-6, 0.01), (4e-7, 0.02), (2e-6, 0.005)], ids=str)
def test_profiling_that_learns_while_serving_keeps_chunks_level_under_noise(true, constant):
    """2 % noise, unit 16: once the profile is over, true times of all chunks but the last are within [0.93, 1.02] T."""
    quad = Quad(*true, constant)
    config, whole = SchedConfig(1, 8192, 100_000, 10_000, 16), quad.ms(0, 8192)
    prompts = [Request(str(k), np.zeros(90_000, int), 3) for k in range(3)]
    for seed in range(4):
        served = serve(config, get("profiling", chunk_ms=whole, chunk_unit=16), prompts, quad, noise=0.02, seed=seed)
        chunks = [(int(p.start[0]), int(p.grant[0])) for p, _ in served.steps if p.grant[0] > 1]
        times = [quad.ms(a, n) / whole for a, n in chunks[32:] if a + n < 90_000 and 640 <= n < 8192]
        assert len(times) > 30 and 0.93 <= min(times) and max(times) <= 1.02, (seed, min(times), max(times))
        assert max(quad.ms(a, n) / whole for a, n in chunks[32:]) <= 1.4


def test_what_profiling_learns_follows_a_chip_that_gets_slower():
    s, strata, at = init(SchedConfig(1, 8192, 100_000, 10_000, 16)), None, 0
    for slower in (1.0, 1.5):
        for turn in range(6000):
            n, start = (512, 2048, 8192)[turn % 3], turn * 37 % 60_000
            ms = slower * TRUE.ms(start, n) + TRUE.c
            at += 1
            timed = Timed(at, (n * (n + 2 * start), n, 1.0), ms)
            strata = profiling.observe(strata, s, timed, dict(chunk_memory=8))
        quad = profiling.known_quad(strata, dict(chunk_memory=8))
        assert abs(quad.ms(0, 8192) / TRUE.ms(0, 8192) / slower - 1) < 0.02
    assert profiling.observe(strata, s, Timed(1, (0.0, 0.0, 1.0), 3.0), {}) is strata      # no prompt in the step


def test_a_learned_fit_with_noise_stays_non_negative():
    rng = np.random.default_rng(1)
    for _ in range(50):
        rows = [((n * n, n, 1.0), 0.01 * n * (1 + 0.2 * rng.standard_normal())) for n in range(16, 400, 16)]
        assert min(attrs.astuple(fit(rows))) >= 0


# ---- composition

SINGLES = ["fcfs", "priority", "shortest", "deadline"]
ALL = {
    "priority": {}, "shortest": {}, "deadline": {}, "decode_first": {"prompt_tokens_beside_decodes": 3},
    "prefill_first": {}, "watermark": {"watermark": 0.2}, "growth": {}, "balance": {}, "recompute": {},
    "profiling": {"chunk_b": 0.01, "chunk_unit": 1, "chunk_ms": 0.05},
}
PAIRS = [(a, b) for a, b in itertools.combinations(ALL, 2)]


def composed(*names):
    params = {k: v for n in names for k, v in ALL[n].items()}
    return compose(*names, **params)


def test_every_policy_file_is_in_the_table():
    assert set(policies.names()) == {*ALL, "fcfs"}


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_any_two_policies_go_together_or_say_why_not(pair):
    """E13 among them: recompute and balance together are fine."""
    single = {frozenset(p) for p in itertools.combinations(["priority", "shortest", "deadline"], 2)}
    single |= {frozenset(("decode_first", "prefill_first"))}
    if frozenset(pair) in single:
        with pytest.raises(ConfigError, match="both decide"):
            composed(*pair)
        return
    policy = composed(*pair)
    assert Policy.from_json(policy.to_json()) == policy
    for kind, depth, drafts, cache in shapes_of(PAIRS.index(pair)):
        serves(policy, GROUPS[kind], depth, drafts, cache)


GROUPS = [(GroupSpec(),), (GroupSpec(), GroupSpec("window", window=5)), (GroupSpec(), GroupSpec("recurrent"))]


def shapes_of(number):
    """(kind of groups, depth, drafts, prefix cache) with which pair `number` is tried; states have no drafts."""
    for kind in range(3):
        yield kind, 1 + (number + kind) % 3, 2 * ((number // 3 + kind) % 2) * (kind != 2), (number // 2 + kind) % 2 == 0


def test_the_pairs_cover_every_two_of_policy_groups_depth_drafts_and_cache():
    seen = set()
    for number, pair in enumerate(PAIRS):
        for shape in shapes_of(number):
            named = list(zip(("groups", "depth", "drafts", "cache"), shape, strict=True))
            seen |= set(itertools.combinations(named, 2)) | {(name, x) for name in pair for x in named}
    values = dict(groups=range(3), depth=(1, 2, 3), drafts=(0, 2), cache=(False, True))
    every = [(n, v) for n, vs in values.items() for v in vs]
    missing = [two for two in itertools.combinations(every, 2) if two[0][0] != two[1][0] and two not in seen]
    missing += [(name, x) for name in ALL for x in every if (name, x) not in seen]
    assert missing == [(("groups", 2), ("drafts", 2))]


def serves(policy, groups, depth, drafts, cache):
    """Nine requests on a tight pool have the outputs that each has alone."""
    config = SchedConfig(4, 8, 30, 12 * len(groups), 3, groups, prefix_cache=cache, drafts=drafts, host_blocks=20)
    run = Run(config, depth, policy)
    requests = [Request(str(i), np.arange(3 + i % 5) % 3, 6 + i, priority=i % 3, arrival=float(i), deadline=5.0 + i)
                for i in range(9)]
    for i in range(0, 9, 3):
        run.submit(*requests[i : i + 3])
        run.step(Peers(0, (1, 2), (1, 1), (3, 4)))
    run.step(Peers(0, (0, 0), (0, 0), (0, 0)))
    run.drain()
    expect_alone(run, requests)


def test_a_policy_is_read_from_a_name_names_json_or_a_file(tmp_path):
    policy = compose("priority", "watermark", watermark=0.1)
    (tmp_path / "p.json").write_text(policy.to_json())
    (tmp_path / "bad.json").write_text(json.dumps({"order": ["fcfs"], "victims": 3, "params": []}))
    assert Policy.read(str(tmp_path / "p.json")) == policy == Policy.read(policy.to_json())
    assert Policy.read("priority+watermark") == compose("priority", "watermark")
    for text in (str(tmp_path / "none.json"), str(tmp_path / "bad.json"), "nothing", "priority+", "{", "[]"):
        with pytest.raises(ConfigError):
            Policy.read(text)


@pytest.mark.parametrize("bad", [
    dict(admit="priority"), dict(order="watermark"), dict(admit="deadline"),
    dict(admit="watermark", params={"watermark": 2.0}),
    dict(params={"nothing": 1}), dict(admit="balance", params={"balance": "fair"}),
    dict(action="recompute", params={"swap": "sometimes"}), dict(admit="watermark", params={"watermark": "much"})])
def test_i05_i07_what_cannot_be_is_told_when_the_policy_is_read(bad):
    with pytest.raises(ConfigError):
        Policy.from_json(json.dumps(bad))


def test_composing_keeps_caps_and_gates_of_all():
    policy = compose("decode_first", "watermark", compose("growth", "priority"), growth_steps=9)
    assert (policy.order, policy.select, policy.admit) == ("priority", "decode_first", ("watermark", "growth"))
    assert policy.chunk == ("fcfs", "decode_first") and dict(policy.params) == {"growth_steps": 9}


def test_decode_first_selects_decodes_before_older_prompts():
    s = SimpleNamespace(sched=np.array([3, 9, 5, 12]), base=np.array([8, 8, 8, 8]))
    [(rows, left, _)] = decode_first.select(s, np.array([0, 1, 2, 3]), np.array([5, 1, 3, 1]), {})
    assert rows.tolist() == [1, 3, 0, 2] and left.tolist() == [1, 1, 5, 3]


@pytest.mark.parametrize("groups", [("full",), ("full", "full"), ("full", "recurrent"), ("full", "window")])
def test_growth_counts_the_blocks_of_every_cache_group(groups):
    rng, specs = np.random.default_rng(0), [GroupSpec(kind, 4, 64 if kind == "window" else 0) for kind in groups]
    requests = [Request(str(i), rng.integers(0, 9, 8), int(rng.integers(10, 40))) for i in range(30)]
    preemptions = []
    for policy in (FCFS, get("growth", growth_steps=1000)):
        run = Run(SchedConfig(16, 64, 128, 30 * len(groups), 4, tuple(specs)), policy=policy)
        run.submit(*requests)
        preemptions.append(run.drain().state.preemptions)
    assert preemptions[0] > 10 and not preemptions[1]
