"""Random traces: outputs never depend on scheduling, and the columns equal the naive reference."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sched_fakes import VOCAB, Device, Run, alone, expect_alone
from sched_reference import Reference

from afl.errors import BadInput
from afl.sched import (
    Aborted,
    Arrived,
    EventLog,
    GroupSpec,
    Policy,
    Request,
    Sampled,
    SchedConfig,
    check,
    init,
    policies,
    replay,
    step,
)

quick = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))

FULL, WINDOW, STATE = GroupSpec(), GroupSpec("window", window=5), GroupSpec("recurrent")
GROUPS = {
    "full": (FULL,), "window": (WINDOW,), "full+window": (FULL, WINDOW), "full+state": (FULL, STATE),
    "mixed sizes": (GroupSpec(block_tokens=4), GroupSpec("window", 2, 3)), "all": (FULL, WINDOW, STATE),
}


def config_of(groups, drafts, seqs, budget, length, blocks, size, cache):
    """A configuration in which something fits: more groups get more blocks."""
    groups = GROUPS[groups]
    drafts = 0 if STATE in groups else drafts
    return SchedConfig(seqs, budget, length, blocks * len(groups), size, groups, cache, drafts)


configs = st.builds(
    config_of, groups=st.sampled_from(["full", "full", *GROUPS]), drafts=st.sampled_from([0, 0, 1, 3]),
    seqs=st.integers(1, 5), budget=st.integers(1, 12), length=st.integers(4, 30), blocks=st.integers(2, 14),
    size=st.sampled_from([1, 2, 3, 4]), cache=st.booleans())
ids = st.lists(st.integers(0, VOCAB - 1), max_size=3)
prompts = st.one_of(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
                    st.builds(lambda n, x: [3] * n + x, st.integers(1, 12), st.lists(st.integers(0, 2), max_size=4)))
shapes = st.builds(dict, prompt=prompts, salt=st.sampled_from(["", "", "", "s"]),
                   max_tokens=st.integers(1, 14), min_tokens=st.integers(0, 6), eos_ids=ids, stop_ids=ids,
                   ignore_eos=st.booleans(), needs_host=st.booleans(), priority=st.integers(0, 2))
policy = st.builds(lambda name, n: policies.get(name, long_prefill_token_threshold=n),
                   st.sampled_from(policies.names()), st.sampled_from([0, 0, 1, 3]))
# What happens before each step: arrivals, and sometimes an abort of a request by number.
traces = st.lists(st.tuples(st.lists(shapes, max_size=3), st.one_of(st.none(), st.none(), st.integers(0, 20))),
                  min_size=1, max_size=12)


def play(config, trace, depth, policy, aborts=True, log=None):
    """Run a trace to its end; returns the run, all requests, and the aborted ids."""
    run, requests, aborted = Run(config, depth, policy, log), [], set()
    for shaped, abort in trace:
        new = [Request(str(len(requests) + i), **s) for i, s in enumerate(shaped)]
        requests += new
        events = [Arrived(r) for r in new]
        if aborts and abort is not None:
            events.append(Aborted(str(abort)))
            aborted.add(str(abort))
        run.step(*events)
    work = sum(len(r.prompt) + r.max_tokens for r in requests)
    run.drain(bound=10 + depth * (work + run.state.preemptions * config.max_model_len) * 4)
    return run, requests, aborted


@quick
@given(configs, traces, st.integers(1, 3), policy)
def test_outputs_equal_those_of_a_request_served_alone(config, trace, depth, policy):
    run, requests, aborted = play(config, trace, depth, policy)
    expect_alone(run, [r for r in requests if r.id not in aborted])
    for r in requests:
        tokens, why = run.result(r.id)
        full, _ = alone(r, config.max_model_len, config.groups)
        if r.id not in run.refused:
            assert tokens == full[: len(tokens)] and why
            assert len(tokens) <= r.max_tokens and len(tokens) + len(r.prompt) <= config.max_model_len
    s = run.state
    assert s.pool.free == config.blocks and not s.tickets and not s.queue.size and not s.away
    assert not s.table.array.any() and not s.status.any() and not len(s.pins) and s.parked == (0, 0)


@quick
@given(configs, traces, policy)
def test_depth_changes_no_output(config, trace, policy):
    runs = [play(config, trace, depth, policy, aborts=False)[0] for depth in (1, 2, 3)]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert runs[0].finish == runs[1].finish == runs[2].finish
    assert runs[0].refused == runs[1].refused == runs[2].refused


@quick
@given(traces, st.integers(1, 3), st.integers(8, 12))
def test_preemption_changes_no_output_and_progress_is_bounded(trace, depth, blocks):
    tight = SchedConfig(5, 8, 28, blocks, 3)
    run, requests, _ = play(tight, trace, depth, Policy(), aborts=False)
    expect_alone(run, requests)
    computed = sum(p.tokens for p in run.plans)
    useful = sum(len(r.prompt) + len(run.result(r.id)[0]) - 1 for r in requests if r.id not in run.refused)
    lost = run.state.recomputed + run.state.refound
    assert useful <= computed <= useful + lost + run.state.dropped     # late rows compute one token each
    assert run.steps <= 10 + 2 * depth * (computed + len(requests) + len(trace))


@quick
@given(configs, traces, st.integers(1, 3), st.sampled_from([0, 3]), st.sampled_from(["fcfs", "priority"]),
       st.sampled_from([0.0, 0.0, 0.3]))
def test_plans_and_outputs_equal_the_naive_reference(config, trace, depth, threshold, order, watermark):
    policy = policies.compose(order, *["watermark"] * (watermark > 0), long_prefill_token_threshold=threshold,
                              **{"watermark": watermark} if watermark else {})
    s, ref, device = init(config, policy), Reference(config, threshold, order, watermark), Device(config)
    flight, n, steps = [], 0, 0
    trace = list(trace)
    while trace or s.busy:
        shaped, abort = trace.pop(0) if trace else ([], None)
        new = [Request(str(n + i), **x) for i, x in enumerate(shaped)]
        n += len(new)
        result = flight.pop(0) if len(flight) == depth else None
        aborts = [] if abort is None or abort >= n - len(new) else [str(abort)]
        for again in (0, 1):
            events = [Aborted(a) for a in aborts] + [Arrived(r) for r in new] + ([result] if result else [])
            s, plan, out = step(s, events, policy)
            check(s)
            expect, outputs = ref.step(aborts, None if result is None else (result.tokens, result.count), new)
            assert out.rows() == outputs, s.frame()
            assert columns_of(s, plan) == expect, s.frame()
            assert s.pool.ids() == ref.free, "the free list, in order"
            assert (s.dropped, s.preemptions, s.recomputed, s.hits) == (
                ref.dropped, ref.preemptions, ref.recomputed, ref.hits)
            if plan is not None:
                flight.append(Sampled(plan.step, *device.run(s, plan)))
            elif flight and not again:
                aborts, new, result = [], [], flight.pop(0)
                continue
            break
        steps += 1
        assert steps < 3000


def columns_of(s, plan):
    """A plan in the form of the reference's."""
    if plan is None:
        return []
    tables = [[b.tolist() for b in s.blocks_of(r)] for r in plan.rows]
    return list(zip(plan.ids, plan.start, plan.grant, plan.drafts, plan.emit, tables, strict=True))


@quick
@given(configs, traces, st.integers(1, 3), policy)
def test_the_log_replays_to_the_same_state(tmp_path_factory, config, trace, depth, policy):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path, config, policy) as log:
        run, _, _ = play(config, trace, depth, policy, log=log)
    assert replay(path).digest() == run.state.digest()
    middle = run.steps // 2
    assert replay(path, steps=middle).digest() == replay(path, steps=middle).digest()
    assert replay(path).frame() == run.state.frame()


def test_a_file_that_is_no_log_is_refused(tmp_path):
    for text in ("", "hello\n", "[]\n", '{"afl_sched_log": 99}\n'):
        (tmp_path / "x").write_text(text)
        try:
            replay(tmp_path / "x")
            raise AssertionError(text)
        except BadInput as e:
            assert "x is " in str(e)


class Scheduler(RuleBasedStateMachine):
    """Events in any order at any depth; plans are executed at once, results come whenever hypothesis likes."""

    @initialize(config=configs, policy=policy)
    def start(self, config, policy):
        self.s, self.device, self.policy, self.config = init(config), Device(config), policy, config
        self.flight, self.tokens, self.finish, self.requests, self.aborted = [], {}, {}, {}, set()
        self.kept = []

    def feed(self, *events):
        before = self.s
        digest = before.digest()
        self.s, plan, out = step(before, events, self.policy)
        again, plan2, _ = step(before, events, self.policy)               # S9, and a fork of the old state
        assert again.digest() == self.s.digest() and (plan is None) == (plan2 is None)
        assert before.digest() == digest
        self.s = again
        for id, token, finish in out.rows():
            assert id not in self.finish
            self.tokens.setdefault(id, []).extend([token] * (token >= 0))
            if finish:
                self.finish[id] = finish
        for id, _ in out.refused:
            self.requests.pop(id)
        if plan2 is not None:
            self.flight.append(Sampled(plan2.step, *self.device.run(self.s, plan2)))

    @precondition(lambda self: len(self.flight) < 3)
    @rule(shaped=st.lists(shapes, min_size=1, max_size=3))
    def arrive(self, shaped):
        n = len(self.requests) + 100 * self.s.step + len(self.finish)
        new = {f"{n}.{i}": Request(f"{n}.{i}", **x) for i, x in enumerate(shaped)}
        new = {k: v for k, v in new.items() if k not in self.requests}
        self.requests |= new
        self.feed(*map(Arrived, new.values()))

    @precondition(lambda self: self.requests and len(self.flight) < 3)
    @rule(data=st.data())
    def abort(self, data):
        id = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(id)
        self.feed(Aborted(id))

    @precondition(lambda self: self.flight)
    @rule(n=st.integers(1, 3))
    def result(self, n):
        events, self.flight = self.flight[:n], self.flight[n:]
        self.feed(*events)

    @precondition(lambda self: len(self.flight) < 3)
    @rule()
    def plan(self):
        self.feed()

    @invariant()
    def sound(self):
        if hasattr(self, "s"):
            check(self.s)
            for id, tokens in self.tokens.items():
                full, _ = alone(self.requests[id], self.config.max_model_len, self.config.groups)
                assert tokens == full[: len(tokens)]

    def teardown(self):
        if not hasattr(self, "s"):
            return
        for _ in range(5000):
            if not self.s.busy:
                break
            events, self.flight = self.flight[:1], self.flight[1:]
            self.feed(*events)
        assert not self.s.busy, self.s.frame()
        for id, r in self.requests.items():
            if id not in self.aborted:
                assert (self.tokens[id], self.finish[id]) == alone(r, self.config.max_model_len, self.config.groups)
        super().teardown()


Scheduler.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None,
                                       suppress_health_check=list(HealthCheck))
TestScheduler = Scheduler.TestCase


def test_preemptions_do_happen_in_these_traces():
    """Guards the generators: a tight pool with long outputs preempts."""
    run = Run(SchedConfig(5, 8, 28, 9, 3), 2)
    requests = [Request(str(i), np.arange(4) + i, 14) for i in range(5)]
    run.submit(*requests)
    expect_alone(run.drain(), requests)
    assert run.state.preemptions >= 3
