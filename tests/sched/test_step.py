"""Worked traces and single behaviours of the transition."""

import subprocess
import sys

import numpy as np
import pytest
from sched_fakes import Run, alone, expect_alone, next_token

from afl.errors import ConfigError
from afl.sched import Aborted, Arrived, Policy, Request, Sampled, SchedConfig, Sent, Tick, check, init, policies, step

TRACE = [Request("r1", range(10), 6), Request("r2", range(20, 26), 4)]


def trace(blocks):
    """(plan as {id: tokens}, blocks held, free) per step of scheduler.md 1.13; the pool has `blocks` usable blocks."""
    run, lines = Run(SchedConfig(4, 8, 16, blocks, 4)), []
    plan = run.submit(*TRACE)
    while plan is not None:
        s = run.state
        held = {s.ids[r]: int(s.held[r]) for r in s.running}
        lines.append((dict(zip(plan.ids, plan.grant.tolist(), strict=True)), held, s.pool.free))
        plan = run.step()
    expect_alone(run, TRACE)
    return lines, run.state


def test_worked_trace_with_room():
    lines, s = trace(7)
    assert lines == [
        ({"r1": 8}, {"r1": 2}, 5),
        ({"r1": 2, "r2": 6}, {"r1": 3, "r2": 2}, 2),
        ({"r1": 1, "r2": 1}, {"r1": 3, "r2": 2}, 2),
        ({"r1": 1, "r2": 1}, {"r1": 3, "r2": 2}, 2),
        ({"r1": 1, "r2": 1}, {"r1": 4, "r2": 3}, 0),
        ({"r1": 1}, {"r1": 4}, 3),
        ({"r1": 1}, {"r1": 4}, 3),
    ]
    assert (s.pool.free, s.preemptions) == (7, 0)


def test_worked_trace_with_preemption():
    lines, s = trace(6)
    assert [plan for plan, _, _ in lines] == [
        {"r1": 8}, {"r1": 2, "r2": 6}, {"r1": 1, "r2": 1}, {"r1": 1, "r2": 1}, {"r1": 1}, {"r1": 1}, {"r1": 1},
        {"r2": 8}, {"r2": 1}]
    assert lines[5][1:] == ({"r1": 4}, 2)
    assert (s.pool.free, s.preemptions, s.recomputed) == (6, 1, 8)


def test_a05_a_prompt_that_can_never_fit_is_refused_with_numbers_and_others_go_on():
    run = Run(SchedConfig(4, 64, 100, 10, 4))
    small = Request("small", [1, 2, 3], 5)
    run.submit(small, Request("big", range(60), 5))
    assert "needs 16 blocks" in run.refused["big"] and "has 10" in run.refused["big"]
    expect_alone(run.drain(), [small])
    assert "big" not in run.finish


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a08_a_preempted_request_recomputes_prompt_and_outputs_in_chunks(depth):
    run = Run(SchedConfig(2, 4, 40, 7, 4), depth)                        # 28 tokens: the two do not fit together
    old, new = Request("old", [5] * 3, 20), Request("new", [6] * 3, 20)
    run.submit(old)
    run.submit(new)
    run.drain()
    expect_alone(run, [old, new])
    assert run.state.preemptions >= 1
    mine = [(int(p.start[i]), int(p.grant[i]), bool(p.emit[i])) for p in run.plans for i in np.flatnonzero(
        p.ids == "new")]
    again = next(i for i, m in enumerate(mine) if i and m[0] == 0)         # resumed from position 0
    known = mine[again - 1][0] + mine[again - 1][1]                        # everything computed before
    chunks = mine[again:]
    done = 0
    for start, n, emits in chunks:
        assert start == done and n <= 4
        done += n
        assert emits == (done > known), "sampled before the last known token was computed"
        if emits:
            break


def test_a10_rows_and_tokens_stay_within_their_caps_under_preemption():
    config = SchedConfig(256, 300, 64, 300, 4)
    run = Run(config)
    requests = [Request(str(i), [i % 13, 1 + i % 5], 6 + i % 5) for i in range(300)]
    run.submit(*requests)
    most = 0
    while run.state.busy:
        most = max(most, len(run.state.running))
        run.step()
    assert most <= 256 and run.state.preemptions > 0
    expect_alone(run, requests)


def test_a11_length_limit_at_the_edge():
    run = Run(SchedConfig(4, 64, 16, 100, 4))
    run.submit(*(Request(str(n), range(n), 50) for n in (14, 15, 16, 17)))
    run.drain()
    assert [len(run.result(n)[0]) for n in ("14", "15")] == [2, 1]
    assert run.finish == {"14": "length", "15": "length"}
    assert set(run.refused) == {"16", "17"} and "at most 15" in run.refused["16"]


@pytest.mark.parametrize("depth", [2, 3])
def test_a13_late_results_of_finished_rows_are_dropped_and_counted(depth):
    prompt = [3, 1, 4]
    tokens = alone(Request("x", prompt, 5), 99)[0]
    request = Request("a", prompt, 20, eos_ids=(tokens[1],))
    run = Run(SchedConfig(2, 16, 64, 32, 4), depth)
    run.submit(request)
    run.drain()
    assert run.result("a") == alone(request, 64) and run.finish["a"] == "stop"
    assert run.state.dropped == depth - 1                                # plans that were in flight when EOS was seen
    assert run.state.pool.free == 32


def test_nobody_overtakes_a_preempted_request_while_its_plans_are_in_flight():
    run = Run(SchedConfig(4, 8, 40, 9, 4), 3)
    run.submit(Request("sent", [1] * 5, 1, readers=1))
    run.drain()                                                          # two blocks stay pinned
    run.submit(Request("old", [5] * 3, 20))
    run.submit(Request("new", [6] * 3, 20))
    while not run.state.preempting:
        run.step()
    run.step(Sent("sent"), Arrived(Request("tiny", [7], 2)))
    first = {}
    while run.state.busy:
        for plan in run.state.inflight:
            first |= {i: plan.step for i, start in zip(plan.ids, plan.start, strict=True) if start == 0}
        run.step()
    assert first["new"] < first["tiny"]


def test_a_victim_that_was_served_in_this_step_gives_that_back():
    """The free block that `low` had been granted goes to `high` at once; low's own come back after the fence."""
    run = Run(SchedConfig(2, 32, 64, 5, 4), 2, policies.get("priority"))
    requests = [Request("low", range(7), 9, priority=1), Request("high", range(8), 9, priority=0)]
    run.submit(requests[0])
    run.submit(requests[1])
    plan = run.step()
    assert plan.ids.tolist() == ["high"] and plan.start.tolist() == [8]
    assert run.steps == 3, "planned only after a result had come"
    expect_alone(run.drain(), requests)


def test_an_abort_with_three_plans_in_flight_gives_everything_back_after_the_last():
    run = Run(SchedConfig(1, 1, 4, 2, 2), 3)
    run.submit(Request("a", [0], 3))
    run.step()
    run.step()
    run.abort("a")
    assert run.finish["a"] == "abort" and run.state.pool.free == 0      # the plans in flight still write there
    run.drain()
    assert run.state.pool.free == 2 and run.state.dropped == 3


def test_a13_results_of_unknown_steps_and_ids_are_dropped():
    s = init(SchedConfig(2, 16, 64, 32, 4))
    s, plan, _ = step(s, [Arrived(Request("a", [1], 3))], Policy())
    s, none, out = step(s, [Aborted("a"), Aborted("a"), Aborted("nobody"), Sampled(plan.step, [5])], Policy())
    assert none is None and out.dropped == 1 and out.rows() == [("a", -1, "abort")]
    s, _, out = step(s, [Sampled(plan.step, [5])], Policy())
    assert out.dropped == 1 and s.dropped == 2 and not s.busy
    check(s)


def test_a25_cancelling_a_thousand_waiting_requests_leaves_nothing():
    run = Run(SchedConfig(1, 16, 64, 16, 4))
    first, last = Request("first", [1, 2], 30), Request("last", [3], 2)
    run.submit(first, *(Request(str(i), [i % 7], 5) for i in range(1000)))
    run.abort(*(str(i) for i in range(1000)))
    assert run.state.queue.size <= 1 and len(run.state.tickets) == 1
    run.abort("first")
    assert not run.state.tickets and run.state.queue.size == 0 and run.state.pool.free == 16
    plan = run.submit(last)
    assert plan.ids.tolist() == ["last"]
    expect_alone(run.drain(), [last])


def test_cancelled_entries_in_the_middle_do_not_pile_up():
    run = Run(SchedConfig(1, 16, 64, 16, 4))
    run.submit(Request("first", [1, 2], 40))
    for i in range(200):
        run.step(Arrived(Request(str(i), [1], 1)))
        if i != 100:
            run.abort(str(i))
        assert run.state.queue.size <= 2 * max(run.state.waiting, 1)


def test_a_request_and_its_abort_in_one_batch_end_it():
    s = init(SchedConfig(2, 16, 64, 32, 4))
    s, plan, out = step(s, [Arrived(Request("a", [1], 3)), Aborted("a")], Policy())
    assert plan is None and not s.busy and out.rows() == [("a", -1, "abort")]


def test_a_stop_string_found_by_the_front_end_ends_with_its_own_reason():
    run = Run(SchedConfig(2, 16, 64, 32, 4))
    run.submit(Request("a", [1], 30))
    run.step(Aborted("a", "stop"))
    assert run.finish["a"] == "stop"


def finish_of(request):
    s, plan, _ = step(init(SchedConfig(2, 16, 64, 32, 4)), [Arrived(request)], Policy())
    tokens = list(request.prompt)
    while True:
        tokens.append(next_token(tokens))
        s, plan, out = step(s, [Sampled(plan.step, [tokens[-1]])], Policy())
        if out.finish[0]:
            return len(tokens) - len(request.prompt), out.rows()[0][2], int(out.stop_reason[0])


def test_stop_rules_in_order():
    t = alone(Request("x", [9, 9], 8), 99)[0]
    assert len(set(t[:4])) == 4, t
    make = lambda **kw: Request("a", [9, 9], 8, **kw)  # noqa: E731
    assert finish_of(make()) == (8, "length", -1)
    assert finish_of(make(eos_ids=(t[2],))) == (3, "stop", -1)
    assert finish_of(make(stop_ids=(t[1],), eos_ids=(t[2],))) == (2, "stop", t[1])
    assert finish_of(make(stop_ids=(t[2],), eos_ids=(t[2],))) == (3, "stop", -1)                    # EOS first
    assert finish_of(make(stop_ids=(t[2],), eos_ids=(t[2],), ignore_eos=True)) == (3, "stop", t[2])
    assert finish_of(make(eos_ids=(t[2],), ignore_eos=True))[1] == "length"
    assert finish_of(make(eos_ids=(t[1],), min_tokens=2))[0] == 2
    n, reason, _ = finish_of(make(eos_ids=(t[1],), min_tokens=3))
    assert n == next((i + 1 for i in range(2, 8) if t[i] == t[1]), 8)
    assert finish_of(make(min_tokens=20)) == (8, "length", -1)
    assert finish_of(make(stop_ids=(t[3], *range(100, 120))))[0] == 4                               # many stop ids


@pytest.mark.parametrize("depth", [2, 3])
def test_rows_that_need_the_host_wait_for_their_last_token_and_others_do_not(depth):
    run = Run(SchedConfig(2, 16, 64, 32, 4), depth)
    requests = [Request("grammar", [1, 2], 6, needs_host=True), Request("free", [2, 3], 12)]
    run.submit(*requests)
    for _ in range(4):
        for plan in run.plans[1:]:
            i = np.flatnonzero(plan.ids == "grammar")
            assert plan.needs_host == bool(len(i))
        run.step()
    run.drain()
    expect_alone(run, requests)
    mine = [p.step for p in run.plans if "grammar" in p.ids]
    assert all(b - a >= depth for a, b in zip(mine, mine[1:], strict=False) if b <= run.plans[-1].step - depth)
    assert len([p for p in run.plans if "free" in p.ids]) == 12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_length_limits_waste_no_row(depth):
    run = Run(SchedConfig(2, 16, 64, 32, 4), depth)
    run.submit(Request("a", [1, 2], 5), Request("b", [1], 1))
    run.drain()
    assert sum(p.tokens for p in run.plans) == 2 + 4 + 1 and run.state.dropped == 0


def test_a_bad_request_is_refused_with_a_reason():
    run = Run(SchedConfig(2, 16, 64, 32, 4))
    run.submit(Request("empty", [], 5), Request("none", [1], 0), Request("a", [1], 2), Request("a", [1], 2))
    assert set(run.refused) == {"empty", "none", "a"} and "in use" in run.refused["a"]


def test_policy_is_data_and_unknown_names_are_told():
    assert {"fcfs", "priority"} <= set(policies.names())
    p = policies.get("priority", long_prefill_token_threshold=4)
    assert Policy.from_json(p.to_json()) == p
    with pytest.raises(ConfigError, match="did you mean 'priority'"):
        policies.get("priorty")
    with pytest.raises(ConfigError, match="did you mean 'long_prefill_token_threshold'"):
        policies.get("fcfs", long_prefil_threshold=4)
    with pytest.raises(ConfigError, match="policy slot"):
        Policy.from_json('{"victims": "fcfs"}')
    with pytest.raises(ConfigError, match="unknown scheduler policy"):
        Policy.from_json('{"victim": "oldest"}')


def test_chunk_threshold_lets_a_second_prompt_in():
    run = Run(SchedConfig(4, 16, 64, 64, 4), policy=policies.get("fcfs", long_prefill_token_threshold=5))
    plan = run.submit(Request("long", range(30), 2), Request("short", range(4), 2))
    assert dict(zip(plan.ids, plan.grant.tolist(), strict=True)) == {"long": 5, "short": 4}


def test_priority_admits_the_important_first_and_preempts_the_unimportant():
    run = Run(SchedConfig(2, 16, 64, 9, 4), policy=policies.get("priority"))
    requests = [Request("low", [1] * 4, 20, priority=5), Request("late", [2] * 4, 20, priority=9),
                Request("high", [3] * 4, 20, priority=0)]
    plan = run.submit(*requests)
    assert plan.ids.tolist() == ["high", "low"]
    while not run.state.preemptions:
        run.step()
    assert [run.state.ids[r] for r in run.state.running] == ["high"]
    expect_alone(run.drain(), requests)


def test_changing_the_policy_reorders_the_queue():
    s = init(SchedConfig(1, 16, 64, 9, 4))
    s, _, _ = step(s, [Arrived(Request("run", [1], 9)), Arrived(Request("a", [1], 9, priority=2)),
                       Arrived(Request("b", [1], 9, priority=1))], Policy())
    assert [e[2] for e in s.queue.entries()] == ["a", "b"]
    s, plan, _ = step(s, [Aborted("run"), Sampled(1, [0])], policies.get("priority"))
    assert plan.ids.tolist() == ["b"]


def test_time_comes_in_as_an_event():
    s, _, _ = step(init(SchedConfig(1, 16, 64, 9, 4)), [Tick(2.5)], Policy())
    assert s.now == 2.5


def test_old_states_stay_valid():
    run, seen = Run(SchedConfig(4, 8, 16, 6, 4)), []
    run.submit(*TRACE)
    while run.state.busy:
        seen.append((run.state, run.state.digest()))
        run.step()
    assert [s.digest() for s, _ in seen] == [d for _, d in seen]
    fork = seen[3][0]
    step(fork, [Sampled(fork.inflight[0].step, [1] * len(fork.inflight[0].rows))], Policy())
    assert [s.digest() for s, _ in seen] == [d for _, d in seen]


def test_config_sizes_are_checked():
    with pytest.raises(ConfigError, match="block_tokens must be at least 1"):
        SchedConfig(1, 1, 1, 1, 0)


def test_the_scheduler_imports_no_torch_and_no_numba():
    code = "import sys, afl.sched; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_a_victim_was_granted_in_the_same_step_goes_to_the_others():
    """Three tokens a step; "middle" has got one when "new", which may not be preempted yet, needs its blocks."""
    run = Run(SchedConfig(3, 3, 20, 11, 2), policy=policies.get("priority"))
    urgent, middle = Request("urgent", [0, 1], 7), Request("middle", [0, 1, 2], 7, priority=1)
    new = Request("new", range(7), 5, priority=2)
    arrivals, plans = {0: middle, 3: urgent, 4: new}, []
    for at in range(7):
        plans.append(run.step(*([Arrived(arrivals[at])] if at in arrivals else [])))
    granted = [dict(zip(p.ids, p.grant.tolist(), strict=True)) for p in plans]
    assert granted[5:] == [{"middle": 1, "urgent": 1, "new": 1}, {"urgent": 1, "new": 2}]
    expect_alone(run.drain(), [urgent, middle, new])
