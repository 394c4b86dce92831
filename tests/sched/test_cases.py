"""Reports from the field as events, and worked examples of the specification."""

import numpy as np
import pytest
from sched_fakes import Run, expect_alone

from afl.sched import Arrived, Peers, Request, Sampled, SchedConfig, check, init, metrics, step
from afl.sched.policies import balance, get
from afl.sched.policy import Candidate


@pytest.mark.parametrize("kind", balance.KINDS)
def test_e12_ranks_decide_from_the_same_exchange_and_agree(kind):
    """any_at_cap: one answer for all.  The others: never do all stop together
    that have work waiting, or those that carry least."""
    rng = np.random.default_rng(3)
    config, policy = SchedConfig(4, 8, 64, 64, 4), get("balance", balance=kind)
    for _ in range(300):
        running, waiting = rng.integers(0, 5, 4), rng.integers(0, 3, 4)
        load = running * rng.integers(1, 9, 4)
        verdicts = []
        for rank in range(4):
            s, _, _ = step(init(config, policy), [Peers(rank, running, waiting, load)], policy)
            c = Candidate(s, None, 0, 1, 0, 64 - int(load[rank]), int(running[rank]), ())
            verdicts.append(balance.admit(c, {"balance": kind, "balance_slack": 0}) is not None)
        able = [v for v, w in zip(verdicts, waiting, strict=True) if w]
        if kind == "any_at_cap":
            assert len(set(verdicts)) == 1 and verdicts[0] == (running.max() >= 4)
        elif kind == "quota" and able:
            assert not all(able), (running, waiting)
        elif able:                                                        # whoever carries least may always take more
            least = min((x for x, r in zip(load, running, strict=True) if r), default=0)
            assert not any(v for v, w, x in zip(verdicts, waiting, load, strict=True) if w and x < least)


def test_e14_ranks_without_work_leave_no_trace():
    config, policy = SchedConfig(4, 32, 64, 40, 4, prefix_cache=True), get("balance")
    states, events = [init(config, policy) for _ in range(4)], [[] for _ in range(4)]
    events[2] = [Arrived(Request("only", [1] * 20, 5))]
    turns = 0
    while any(s.busy for s in states) or events[2]:
        told = [len(s.running) for s in states], [s.waiting for s in states], [40 - s.pool.free for s in states]
        for i in range(4):
            states[i], plan, _ = step(states[i], [Peers(i, *told), *events[i]], policy)
            assert plan is None or i == 2
            events[i] = [] if plan is None else [Sampled(plan.step, np.full(len(plan.rows), 1))]
        turns += 1
        assert turns < 50
    fresh = metrics(init(config, policy))
    for i, s in enumerate(states):
        check(s)
        assert (metrics(s) == fresh) == (i != 2) and s.pool.free == 40


def test_a07_a_resumed_request_needs_room_for_all_that_it_knows():
    """12 blocks of context, a first chunk of 2 and 5 blocks free: it waits, whatever its chunk."""
    run = Run(SchedConfig(3, 8, 96, 20, 4))
    run.submit(Request("big", range(58), 15, ignore_eos=True))            # 15 blocks of 20
    for _ in range(8):
        run.step()
    run.submit(Request("twelve", np.arange(46), 3))
    assert run.state.notes.ids == ("twelve",) and run.state.notes.rules == ("blocks",)
    assert (run.state.notes.a, run.state.notes.b) == ((12,), (5,)) and run.state.tickets["twelve"].row < 0
    run.drain()
    assert set(run.finish) == {"big", "twelve"}                           # `Run` asserts a token between preemptions


def test_a15_counters_never_fall_and_what_was_once_its_own_is_no_hit():
    gauges = {"running", "waiting", "in_flight", "blocks", "blocks_used", "blocks_pinned", "blocks_named"}
    run = Run(SchedConfig(5, 16, 40, 12, 3, prefix_cache=True), depth=2)
    requests = [Request(f"r{i}", (np.arange(3 + i) * (i + 1)) % 5, 6 + i) for i in range(9)]
    before, turns = metrics(run.state), 0
    for r in requests:
        run.submit(r)
    while run.state.busy:
        run.step()
        now = metrics(run.state)
        for name in set(now) - gauges:
            if isinstance(now[name], dict):
                assert all(n >= before[name].get(k, 0) for k, n in now[name].items()), name
            else:
                assert now[name] >= before[name], name
        assert now["prefix_hit_tokens"] <= now["prefix_queried_tokens"] <= now["prompt_tokens"]
        before, turns = now, turns + 1
    assert before["preemptions"] > 0 and before["prompt_tokens"] == sum(len(r.prompt) for r in requests)
    expect_alone(run, requests)


def test_3_1_a_preempted_request_goes_on_from_its_tokens():
    """Prompt 1000, 37 yielded, at most 100: 1037 tokens are computed again and 63 may follow.

    The sheet's 64 is the reference's: it adds the number of retries, since each retry counts a token twice.
    """
    run = Run(SchedConfig(2, 2048, 1200, 140, 16))
    run.submit(Request("old", np.arange(1060) % 16, 110, ignore_eos=True))
    run.submit(Request("r", np.arange(1000) % 17, 100, ignore_eos=True))
    while run.state.tickets["r"].preempts == 0:
        run.step()
    ticket, said = run.state.tickets["r"], len(run.tokens["r"])
    assert len(ticket.tokens) == 1000 + said and ticket.limit - len(ticket.tokens) == 100 - said
    assert ticket.tokens[1000:].tolist() == run.tokens["r"]
    run.drain()
    assert len(run.tokens["r"]) == 100 and run.state.recomputed == 1000 + said - 1
