"""What happens to requests besides running: waiting for something, pauses, sessions, transfers, priorities, time."""

import re

import numpy as np
import pytest
from sched_fakes import Run, alone, expect_alone

from afl.sched import (
    Aborted,
    Arrived,
    Grammar,
    GroupSpec,
    Input,
    Loaded,
    Paused,
    Ranked,
    Request,
    Resumed,
    SchedConfig,
    Sent,
    Tick,
    check,
    metrics,
    notes,
    policies,
)
from afl.sched.policies import get
from afl.sched.results import repeats

SMALL = SchedConfig(4, 16, 64, 32, 4)


def ids(plan):
    return [] if plan is None else plan.ids.tolist()


def empty(run):
    """Nothing is left of any request."""
    s = run.state
    assert not s.tickets and not s.inflight and s.pool.free == s.config.blocks and not s.status.any()
    assert not len(s.pins) and s.parked == (0, 0) and s.queue.size == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_that_wait_for_their_grammar_hold_nothing_up(depth):
    run = Run(SMALL, depth)
    slow, fast = Request("slow", [1, 2], 4, grammar=True), Request("fast", [3], 4)
    assert ids(run.submit(slow, fast)) == ["fast"]
    assert metrics(run.state)["waiting"]["grammar"] == 1
    for _ in range(3):
        run.step()
    run.step(Grammar("slow"))
    while run.state.busy:
        run.step()
    expect_alone(run, [slow, fast])
    empty(run)


def test_a_grammar_that_fails_ends_the_request_also_after_output():
    run = Run(SMALL)
    run.submit(Request("a", [1], 9, grammar=True), Request("b", [2], 9))
    run.step(Grammar("a", ok=False))
    run.step(Grammar("b", ok=False), Grammar("nobody"))
    assert run.finish == {"a": "error", "b": "error"} and run.tokens["b"]
    run.drain()
    empty(run)


def test_a09_parked_requests_that_are_cancelled_leave_room():
    run = Run(SchedConfig(2, 16, 64, 32, 4))
    run.submit(*(Request(f"p{i}", range(5), 3, remote=4) for i in range(2)), Request("work", [1], 3))
    assert run.step() is None and run.state.loading == 2
    assert run.state.notes.rules == ("rows",)
    run.abort("p0", "p1")
    assert len(run.state.pins) == 2, "blocks stay until the transfer has ended"
    run.drain()
    assert run.finish["work"] == "length"
    run.step(Loaded("p0", 4), Loaded("p1", 0, failed=True), Loaded("p1", 4))
    empty(run)


@pytest.mark.parametrize("groups", [(GroupSpec(),), (GroupSpec(), GroupSpec("window", window=5)),
                                    (GroupSpec(), GroupSpec("recurrent"))])
@pytest.mark.parametrize("came", [12, 4, 0])
def test_g04_g05_what_does_not_come_from_elsewhere_is_computed(groups, came):
    config = SchedConfig(2, 16, 64, 60, 4, groups, prefix_cache=True)
    run = Run(config, 2)
    request = Request("a", [5, 3, 1, 2] * 4, 6, remote=12)
    assert not len(run.submit(request).rows)
    (load,) = run.loads
    assert (load.start, load.stop) == (0, 12)
    assert run.step() is None and run.state.loading == 1
    if came:
        run.device.load(load, request.prompt.tolist(), config.groups)
    if came < 12:                                                         # what came is only part: the rest is garbage
        for store in run.device.store:
            for block in load.blocks[0][came // 4 :]:
                store[block] = -1
        for state in run.device.state:
            state[:] = -1
    plan = run.step(Loaded("a", came, failed=came < 12))
    expect = 12 if came == 12 else 0 if len(groups) > 1 else came
    assert int(plan.start[0]) == expect
    expect_alone(run.drain(), [request])
    empty(run)
    again = Request("b", [5, 3, 1, 2] * 4, 6)                             # no bad block is left under a name
    run.submit(again)
    expect_alone(run.drain(), [again])


def test_a02_what_is_here_already_is_not_loaded_and_late_news_is_ignored():
    run = Run(SchedConfig(2, 16, 64, 60, 4, prefix_cache=True))
    run.submit(Request("a", range(9), 2))
    run.drain()
    run.submit(Request("b", range(9), 2, remote=8))
    assert not run.loads and int(run.plans[-1].start[0]) == 8
    run.step(Loaded("b", 8))
    expect_alone(run.drain(), [Request("b", range(9), 2)])


def test_g06_blocks_for_readers_are_freed_once_after_all_have_read_or_the_time_is_up():
    run = Run(SchedConfig(2, 16, 64, 32, 4, read_timeout=10.0))
    run.submit(Request("a", range(9), 1, readers=2), Request("b", range(5), 1, readers=1))
    run.drain()
    assert run.state.pool.free == 32 - 3 - 2
    run.step(Sent("a", 0), Sent("a", 0))                                   # the same reader twice
    assert run.state.pool.free == 27
    run.step(Sent("a", 1), Sent("a", 1), Sent("nobody"))
    assert run.state.pool.free == 30
    run.submit(Request("b", [1], 1))                                       # G07: the id is still in use
    assert "until the transfer" in run.refused["b"]
    run.step(Tick(9.0))
    assert run.state.pool.free == 30
    run.step(Tick(10.0))
    empty(run)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_pausing_changes_no_output(depth, mode):
    run = Run(SchedConfig(2, 16, 64, 32, 4), depth)
    requests = [Request(str(i), [i, 2], 8) for i in range(4)]
    run.submit(*requests)
    run.step()
    run.step(Paused(mode))
    sched = run.state.sched.copy()
    for _ in range(30):
        run.step()
    if mode == "keep":                                                     # S12
        assert (run.state.sched == sched).all() and len(run.state.running) == 2 and not run.flight
    else:
        assert set(run.finish) == {"0", "1"} and run.state.waiting == 2 and not len(run.state.running)
    run.step(Resumed())
    expect_alone(run.drain(), requests)
    empty(run)


def test_a_pause_can_end_everything():
    run = Run(SchedConfig(2, 16, 64, 32, 4), 2)
    run.submit(*(Request(str(i), [i], 9) for i in range(3)), Request("g", [1], 1, grammar=True))
    run.step(Paused("abort"))
    assert set(run.finish.values()) == {"abort"} and len(run.finish) == 4
    run.drain()
    empty(run)
    run.submit(Request("new", [1], 2))
    assert not run.tokens.get("new")
    run.step(Resumed())
    run.drain()
    assert run.finish["new"] == "length"


@pytest.mark.parametrize("cache", [False, True])
def test_a_session_goes_on_with_its_next_input(cache):
    run = Run(SchedConfig(2, 32, 64, 32, 4, prefix_cache=cache))
    run.submit(Request("s", range(6), 3, session=True))
    for _ in range(5):
        run.step()
    first = run.result("s")[0]
    assert len(first) == 3 and metrics(run.state)["waiting"]["input"] == 1 and run.state.pool.free == 32
    known = [*range(6), *first[:-1], 9, 9]
    plan = run.step(Input("s", [9, 9], 4))
    assert int(plan.start[0]) == (8 if cache else 0)
    for _ in range(6):
        run.step()
    assert run.tokens["s"][3:] == alone(Request("x", known, 4), 64)[0]
    run.step(Input("s", [], 2))                                            # shorter: nothing new at all
    for _ in range(4):
        run.step()
    assert len(run.tokens["s"]) == 3 + 4 + 2
    run.step(Input("s", range(60), 4))
    assert run.finish["s"] == "length" and "leaves no room" in run.refused["s"]
    empty(run)


def test_a_waiting_session_can_be_given_up():
    run = Run(SMALL)
    run.submit(Request("s", [1], 1, session=True))
    run.step()
    run.abort("s")
    assert run.finish["s"] == "abort"
    empty(run)


def test_a_changed_priority_moves_a_waiting_request_and_spares_a_running_one():
    run = Run(SchedConfig(2, 16, 64, 9, 4), policy=policies.get("priority"))
    requests = [Request("a", [1] * 4, 20, priority=1), Request("b", [2] * 4, 20, priority=2),
                Request("c", [3] * 4, 20, priority=3), Request("d", [4] * 4, 20, priority=4)]
    run.submit(*requests)
    run.step(Ranked("d", 0), Ranked("a", 9), Ranked("d", 0), Ranked("nobody", 1))
    assert run.state.queue.head()[2] == "d"
    while not run.state.preemptions:
        run.step()
    assert "a" not in [run.state.ids[r] for r in run.state.running]
    expect_alone(run.drain(), requests)


def test_requests_expire_wherever_they_are():
    run = Run(SchedConfig(1, 16, 64, 32, 4), 2)
    run.submit(Request("run", [1], 50, expires=5.0), Request("wait", [1], 5, expires=4.0),
               Request("late", [2], 2, expires=99.0))
    run.step(Tick(3.9))
    assert not run.finish
    run.step(Tick(4.0))
    assert run.finish == {"wait": "expired"}
    run.step(Tick(7.0))
    assert run.finish["run"] == "expired"
    run.drain()
    assert run.finish["late"] == "length"
    empty(run)


def test_every_stop_condition():
    config, prompt = SchedConfig(2, 16, 64, 32, 4), [9, 9]
    said = alone(Request("x", prompt, 12), 64)[0]
    cases = {
        "length": Request("a", prompt, 4), "stop": Request("a", prompt, 9, eos_ids=(said[2],)),
        "repetition": Request("a", [1], 60, repeat=(1, 4, 2)),
    }
    for why, request in cases.items():
        for depth in (1, 3):
            run = Run(config, depth)
            run.submit(request)
            run.drain()
            assert run.finish["a"] == why and run.result("a") == alone(request, 64), why
    assert repeats([1, 2, 3, 1, 2, 3], 1, 3, 2) and not repeats([1, 2, 3, 1, 2, 3], 1, 2, 2)
    assert repeats([5, 5, 5], 1, 1, 3) and not repeats([4, 5, 5], 1, 1, 3) and not repeats([7, 7], 2, 3, 2)
    run = Run(config)
    run.submit(Request("p", range(20), 0, pooling=True))
    run.drain()
    assert run.finish["p"] == "stop" and "p" not in run.tokens and sum(p.tokens for p in run.plans) == 20
    run.submit(Request("bad", [1], 5, repeat=(3, 2, 1)))
    assert "shortest" in run.refused["bad"]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
def test_a14_drafts_change_no_output_and_rejections_are_taken_back(depth, luck):
    config = SchedConfig(3, 24, 40, 40, 4, drafts=3)
    run = Run(config, depth, luck=luck)
    requests = [Request(str(i), [i, 4, 4], 20, eos_ids=(i,)) for i in range(4)]
    run.submit(*requests)
    run.step()
    run.abort("2")
    run.drain()
    expect_alone(run, [r for r in requests if r.id != "2"])
    empty(run)
    if luck in (0.0, 1.0):
        assert run.state.accepted == (0 if luck == 0 else run.state.drafted)
    if luck == 1.0 and depth == 1:
        mine = [p for p in run.plans if "3" in p.ids]
        assert len(mine) < len(run.result("3")[0]), "accepted drafts save steps"


def test_a12_drafts_shrink_to_what_the_length_allows():
    config = SchedConfig(1, 16, 16, 8, 4, drafts=3)
    run = Run(config, luck=1.0)
    run.submit(Request("a", range(13), 50))
    run.drain()
    assert [(int(p.start[0]), int(p.grant[0]), int(p.drafts[0])) for p in run.plans] == [(0, 13, 0), (13, 2, 1)]
    assert run.finish["a"] == "length" and len(run.tokens["a"]) == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("groups", [(GroupSpec(),), (GroupSpec(), GroupSpec("window", window=5)),
                                    (GroupSpec(), GroupSpec("recurrent"))])
def test_swapped_requests_go_on_where_they_were(depth, groups):
    config = SchedConfig(5, 8, 28, 11 * len(groups), 3, groups, host_blocks=40)
    run = Run(config, depth, policies.get("recompute", swap="always"))
    requests = [Request(str(i), np.arange(4) + i, 14) for i in range(5)]
    run.submit(*requests)
    expect_alone(run.drain(), requests)
    s = run.state
    assert s.swaps >= 2 and s.recomputed == 0 and s.hosts.free == 40
    empty(run)


def test_a_swapped_request_that_is_given_up_frees_its_host_blocks():
    config = SchedConfig(5, 8, 28, 11, 3, host_blocks=40)
    run = Run(config, 1, policies.get("recompute", swap="always"))
    run.submit(*(Request(str(i), np.arange(4) + i, 14) for i in range(5)))
    while run.state.hosts.free == 40:
        run.step()
    run.abort(*map(str, range(5)))
    run.drain()
    assert run.state.hosts.free == 40
    empty(run)


def test_a_request_is_given_up_in_every_place_and_twice():
    for n in range(12):
        run = Run(SchedConfig(3, 6, 40, 9, 4, prefix_cache=True, host_blocks=9), 1 + n % 3)
        run.submit(Request("g", [1], 3, grammar=True), Request("r", range(9), 5, remote=8), Request("a", range(10), 9),
                   Request("s", [1], 1, session=True), Request("w", range(12), 5))
        for _ in range(n):
            run.step()
        run.step(*(Aborted(i) for i in ("g", "r", "a", "s", "w", "a", "nobody")))
        run.drain()
        run.step(Loaded("r", 8))
        check(run.state)
        empty(run)


def test_explanations_name_request_rule_and_numbers():
    run = Run(SchedConfig(4, 16, 64, 5, 4))
    run.submit(Request("a", range(10), 8), Request("b", range(12), 4))
    assert run.state.explain() == ["b: it needs 3 blocks, 2 are neither held nor promised"]
    assert metrics(run.state)["skips"] == {"blocks": 1}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_b12_nothing_is_sampled_before_the_last_chunk(depth):
    for chunk in range(1, 10):
        run = Run(SchedConfig(2, chunk, 64, 32, 4), depth)
        request = Request("a", range(9), 4)
        run.submit(request)
        expect_alone(run.drain(), [request])
        assert [bool(p.emit[0]) for p in run.plans if p.kv_len[0] < 9] == [False] * (-(-9 // chunk) - 1)


def test_a_hundred_thousand_waiting_requests_cost_a_step_nothing():
    run = Run(SchedConfig(1, 16, 64, 16, 4))
    from afl.sched import init, step

    s, policy = init(run.state.config), run.policy
    prompt = np.arange(8)
    s, plan, _ = step(s, [Arrived(Request(str(i), prompt, 50)) for i in range(100_000)], policy)
    size, node = s.queue.size, s.queue.node
    for _ in range(5):
        from afl.sched import Sampled
        s, plan, _ = step(s, [Sampled(plan.step, [1])], policy)
    assert s.queue.size == size and s.queue.node is node, "the queue was not touched"


def test_readers_come_in_any_order_and_count_once():
    run = Run(SMALL)
    run.submit(Request("a", range(9), 1, readers=3))
    run.drain()
    for readers in ((2, 2), (0, 0), (2, 0)):
        run.step(*(Sent("a", r) for r in readers))
        assert run.state.pool.free == 32 - 3
    run.step(Sent("a", 1))
    empty(run)


def test_every_turn_of_a_session_is_read_once_by_each_reader():
    run = Run(SchedConfig(2, 16, 64, 32, 4, read_timeout=10.0))
    run.submit(Request("s", range(6), 2, session=True, readers=2))
    for more in (None, [9, 9]):
        if more:
            run.step(Input("s", more, 2))
        for _ in range(4):
            run.step()
    assert len(run.tokens["s"]) == 4 and len(run.state.pins["s"]) == 2
    turns = [len(p.blocks) for p in run.state.pins["s"]]
    run.step(Sent("s", 0))
    run.step(Sent("s", 1))
    assert [len(p.blocks) for p in run.state.pins["s"]] == turns[1:]
    run.step(Sent("s", 0))
    run.step(Tick(99.0))
    run.abort("s")
    empty(run)


def test_a25_given_up_requests_leave_no_alarm():
    run = Run(SMALL)
    run.submit(*(Request(str(i), [1] * 9, 2, expires=1e9) for i in range(50)))
    run.abort(*map(str, range(50)))
    run.drain()
    assert run.state.alarms.size == 0
    empty(run)


def explained(run):
    """id -> rules, from the sentences."""
    known = {re.sub(r"\{.\}", "[-\\\\d.e]+", text): rule for rule, text in notes.TEXT.items()}
    said: dict[str, list[str]] = {}
    for line in run.state.explain():
        id, _, sentence = line.partition(": ")
        said.setdefault(id, []).append(next(r for pattern, r in known.items() if re.fullmatch(pattern, sentence)))
    return said


def test_whoever_waits_for_long_is_told_why():
    run = Run(SchedConfig(4, 64, 64, 40, 4))
    run.submit(Request("g", [1, 2], 3, grammar=True), Request("far", range(20), 3, remote=12),
               Request("s", [4], 1, session=True))
    for _ in range(3):
        run.step()
    assert explained(run) == {"g": ["grammar"], "far": ["remote"], "s": ["input"]}
    assert "far: it waits for 12 tokens from elsewhere" in run.state.explain()
    run.step(Paused("wait"))
    run.submit(Request("late", [5], 2))
    assert explained(run)["late"] == ["paused"] and explained(run)["g"] == ["grammar"]
    run.step(Resumed(), Loaded("far", 12), Grammar("g"))
    run.step(Paused("keep"))
    assert explained(run)["far"] == explained(run)["g"] == ["paused"]


def test_rows_that_a_policy_passes_over_are_told_so():
    run = Run(SchedConfig(4, 8, 64, 40, 4), policy=get("prefill_first"))
    run.submit(Request("a", [1], 9, ignore_eos=True))
    run.step()
    run.submit(Request("b", range(20), 2))
    assert explained(run) == {"a": ["select"]}


def test_the_head_of_the_queue_is_told_of_a_preemption():
    run = Run(SchedConfig(3, 32, 32, 6, 4), depth=1)
    run.submit(Request("a", range(8), 15, ignore_eos=True), Request("b", range(8), 15, ignore_eos=True))
    seen = []
    for i in range(12):
        if i == 2:
            run.submit(Request("c", range(20), 3))
        else:
            run.step()
        if run.state.preemptions:
            seen.append(explained(run))
            break
    assert seen == [{"b": ["preempted"], "c": ["preemption"]}] or seen == [{"b": ["preempted"]}], seen


def test_blocks_for_a_load_that_may_fail_stay_set_aside():
    """Loaded, the window group needs 2 blocks; computed here, all 5: until the load has come nobody else gets them."""
    config = SchedConfig(2, 1, 10, 10, 2, (GroupSpec(), GroupSpec("window", window=5)))
    run = Run(config, depth=2)
    far, other = Request("far", [0] * 9, 1, remote=9), Request("other", [3], 1)
    run.submit(far, other)
    run.step()
    assert run.state.tickets["other"].row < 0 and run.state.notes.rules == ("blocks",)
    run.step(Loaded("far", 0, failed=True))                               # `Run` checks that all promises hold
    run.drain()
    expect_alone(run, [far, other])
