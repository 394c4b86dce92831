"""Random events of every kind over combinations of policy, cache groups, depth and speculation; every state is checked.

The outputs of each request, turn by turn, are those that it has alone.  10,000 events here, 200,000 in the soak.
"""

import attrs
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sched_fakes import VOCAB, Device, alone

from afl.sched import (
    Aborted,
    Arrived,
    Grammar,
    GroupSpec,
    Input,
    Loaded,
    Paused,
    Peers,
    Ranked,
    Request,
    Reset,
    Resumed,
    Sampled,
    SchedConfig,
    Sent,
    Tick,
    check,
    init,
    policies,
    step,
)

FULL, WINDOW, STATE = GroupSpec(), GroupSpec("window", window=5), GroupSpec("recurrent")
GROUPS = [(FULL,), (FULL,), (FULL, WINDOW), (FULL, STATE), (GroupSpec(block_tokens=4), GroupSpec("window", 2, 3)),
          (WINDOW,), (FULL, WINDOW, STATE)]
PARAMS = {"watermark": {"watermark": 0.2}, "recompute": {"swap": "always"}, "balance": {"balance": "any_at_cap"},
          "profiling": {"chunk_b": 0.01, "chunk_ms": 0.05, "chunk_unit": 1},
          "decode_first": {"prompt_tokens_beside_decodes": 3}, "fcfs": {"long_prefill_token_threshold": 3}}


def composed(order, select, more):
    names = [n for n in (order, select, *more) if n]
    return policies.compose(*names, **{k: v for n in names for k, v in PARAMS.get(n, {}).items()})


POLICIES = st.one_of(st.just(policies.compose("fcfs")), st.builds(
    composed, st.sampled_from(["", "fcfs", "priority", "shortest", "deadline"]),
    st.sampled_from(["", "", "decode_first", "prefill_first"]),
    st.sets(st.sampled_from(["watermark", "growth", "balance", "recompute", "profiling"]), max_size=3).map(sorted)))

tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
tails = st.lists(st.integers(0, 2), max_size=4)
prompts = st.one_of(tokens, st.builds(lambda n, x: [3] * n + x, st.integers(1, 12), tails))
few = st.lists(st.integers(0, VOCAB - 1), max_size=2)
shapes = st.builds(
    dict, prompt=prompts, max_tokens=st.integers(1, 12), min_tokens=st.integers(0, 4), eos_ids=few, stop_ids=few,
    ignore_eos=st.booleans(), needs_host=st.booleans(), priority=st.integers(0, 2), salt=st.sampled_from(["", "", "s"]),
    repeat=st.sampled_from([(), (), (1, 3, 2)]), grammar=st.sampled_from([False, False, True]),
    session=st.booleans(), remote=st.sampled_from([0, 0, 0, 5, 9]),
    readers=st.sampled_from([0, 0, 2]), deadline=st.sampled_from([5.0, 50.0]),
    expires=st.sampled_from([float("inf"), float("inf"), 30.0]))


class Machine(RuleBasedStateMachine):
    """Plans are run at once, results come whenever hypothesis likes, at most `depth` of them late."""

    @initialize(policy=POLICIES, groups=st.sampled_from(GROUPS), depth=st.integers(1, 3),
                drafts=st.sampled_from([0, 0, 2]), seqs=st.integers(1, 5), budget=st.integers(1, 12),
                length=st.integers(6, 30), blocks=st.integers(3, 14), size=st.sampled_from([1, 2, 3, 4]),
                cache=st.booleans())
    def start(self, policy, groups, depth, drafts, seqs, budget, length, blocks, size, cache):
        config = SchedConfig(seqs, budget, length, blocks * len(groups), size, groups, cache,
                             0 if STATE in groups else drafts, host_blocks=30, read_timeout=5.0)
        self.s, self.config, self.policy, self.depth = init(config, policy), config, policy, depth
        self.device, self.flight, self.n, self.now = Device(self.s.config), [], 0, 0.0
        self.requests, self.turns, self.said, self.over = {}, {}, {}, {}
        self.limits, self.loads, self.events = {}, {}, 0

    # ---- driving

    def feed(self, *events):
        self.events += max(1, len(events))
        before = self.s
        self.s, plan, out = step(before, events, self.policy)
        check(self.s)
        if self.events % 16 == 0:                                          # S9, and the old state is still there
            again, _, _ = step(before, events, self.policy)
            assert again.digest() == self.s.digest()
            self.s = again
        for id, token, why in out.rows():
            assert id not in self.over, "something after the finish"
            if token >= 0:
                self.said[id].append(token)
            if why:
                self.end_turn(id, why)
        for id, _ in out.refused:
            if id not in self.turns or self.s.tickets.get(id) is None:
                self.over.setdefault(id, "refused")
        self.order(before)
        if plan is not None:
            for load in plan.loads:
                self.loads[load.id] = load
            made = self.device.run(self.s, plan)
            if made is not None:
                self.flight.append(Sampled(plan.step, *made))

    def end_turn(self, id, why):
        request, prompt = self.requests[id], self.turns[id]
        full, end = alone(self.turn(request, prompt), self.config.max_model_len, self.s.config.groups)
        said = self.said[id]
        if why in ("stop", "length", "repetition") and said:
            assert (said, why) == (full, end), id
        assert said == full[: len(said)], id
        if self.s.tickets.get(id) is None:
            self.over[id] = why

    def turn(self, request, prompt):
        return attrs.evolve(request, prompt=prompt, max_tokens=self.limits[request.id])

    def order(self, before):
        """S6 for first come, first served with all gates open; S7 for priority."""
        new = [t.number for id, t in self.s.tickets.items() if t.row >= 0 and (
            (was := before.tickets.get(id)) is None or was.row < 0)]
        if self.policy == policies.compose("fcfs") and new:
            assert max(new) <= min((t.number for t in self.s.tickets.values() if t.entry is not None), default=10**9)
        if self.policy.victim == "priority":
            lost = [self.s.tickets[i].priority for i, r in zip(self.s.notes.ids, self.s.notes.rules, strict=True)
                    if r in ("preempted", "swapped") and i in self.s.tickets]
            emitted = [r for r in self.s.running if self.s.tokens.lengths[r] > self.s.base[r]]
            assert not lost or not emitted or max(self.s.priority[emitted]) <= max(lost)

    # ---- events

    @rule(shaped=st.lists(shapes, min_size=1, max_size=3))
    def arrive(self, shaped):
        made = []
        for x in shaped:
            self.n += 1
            r = Request(f"q{self.n}", arrival=self.now, **{**x, "deadline": self.now + x["deadline"],
                                                           "expires": self.now + x["expires"]})
            self.requests[r.id], self.turns[r.id], self.said[r.id] = r, r.prompt, []
            self.limits[r.id] = r.max_tokens
            made.append(Arrived(r))
        self.room()
        self.feed(*made)

    def room(self):
        """Never more than `depth` plans in flight: a step may add one."""
        while len(self.flight) >= self.depth:
            self.feed_result()

    def feed_result(self):
        event = self.flight.pop(0)
        self.feed(event)

    @rule()
    def go(self):
        if self.flight and len(self.flight) >= self.depth:
            self.feed_result()
        else:
            self.feed()

    @rule(n=st.integers(1, 4))
    def results(self, n):
        for _ in range(min(n, len(self.flight))):
            self.feed_result()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), what=st.sampled_from(["abort", "grammar", "bad grammar", "rank", "sent", "loaded", "input"]))
    def news(self, data, what):
        self.room()
        alive = [i for i in self.requests if i not in self.over] or list(self.requests)
        where = {"input": [i for i in alive if (t := self.s.tickets.get(i)) is not None and t.place == 3],
                 "sent": [i for i, _ in self.s.pins.items()]}                # where the news is some
        id = data.draw(st.sampled_from(where.get(what) or alive))
        if what == "input":
            ticket = self.s.tickets.get(id)
            if ticket is None or ticket.place != 3:
                return
            more, most = data.draw(tokens), data.draw(st.integers(1, 6))
            known = ticket.tokens.tolist()
            keep = known[:-1] if len(known) > len(ticket.request.prompt) else known
            self.turns[id], self.said[id], self.limits[id] = [*keep, *more], [], most
            self.feed(Input(id, more, most))
            return
        self.feed({"abort": Aborted(id), "grammar": Grammar(id), "bad grammar": Grammar(id, False),
                   "rank": Ranked(id, data.draw(st.integers(0, 3))), "sent": Sent(id, data.draw(st.integers(0, 2))),
                   "loaded": None}[what] or self.load(id, data.draw(st.booleans())))

    def load(self, id, whole):
        load = self.loads.pop(id, None)
        if load is None:
            return Loaded(id, 3)
        if whole and id not in self.over:
            self.device.load(load, list(self.turns[id]), self.s.config.groups)
        return Loaded(id, load.stop if whole else 0, failed=not whole)

    @rule(what=st.sampled_from(["wait", "keep", "resume", "resume", "reset", "tick", "peers"]), x=st.integers(0, 4))
    def world(self, what, x):
        self.room()
        self.now += x if what == "tick" else 0
        self.feed({"wait": Paused("wait"), "keep": Paused("keep"), "resume": Resumed(), "reset": Reset(),
                   "tick": Tick(self.now), "peers": Peers(0, (x, 2), (1, x), (x, 3))}[what])

    def teardown(self):
        if not hasattr(self, "s"):
            return
        self.room()
        self.feed(Resumed(), Peers(0, (0, 0), (0, 0), (0, 0)))
        for id in list(self.loads):
            self.room()
            self.feed(self.load(id, True))
        for id, ticket in list(self.s.tickets.items()):
            self.room()
            self.feed(Grammar(id) if ticket.place == 2 else Aborted(id) if ticket.place == 3 else Tick(self.now))
        # S5: a step computes a token at least, and a preempted request has yielded one since its admission
        bound = 200 + 4 * sum(t.limit for _, t in self.s.tickets.items()) * self.config.max_seqs
        for _ in range(bound):
            if not self.s.busy:
                break
            if self.flight:
                self.feed_result()
            else:
                self.now += 1.0                                            # readers that never come give up
                self.feed(Tick(self.now))
            for id in list(self.loads):
                self.room()
                self.feed(self.load(id, True))
            for id, ticket in list(self.s.tickets.items()):
                if ticket.place == 3:
                    self.room()
                    self.feed(Aborted(id))
        assert not self.s.busy, self.s.frame()
        while self.flight:
            self.feed_result()
        self.feed(Tick(self.now + 1000.0))
        for id in list(self.loads):
            self.feed(self.load(id, True))
        s = self.s
        assert s.pool.free == s.config.blocks and s.hosts.free == 30 and not len(s.pins) and s.parked == (0, 0)    # K7
        assert set(self.over) == set(self.requests)
        COUNT[0] += self.events


COUNT = [0]


def play(events):
    """Run machines until they have seen `events` events."""
    COUNT[0] = 0
    while COUNT[0] < events:
        run_state_machine_as_test(Machine, settings=settings(
            max_examples=min(100, 1 + (events - COUNT[0]) // 70), stateful_step_count=50, deadline=None,
            suppress_health_check=list(HealthCheck)))


def test_ten_thousand_events():
    play(10_000)


@pytest.mark.soak
def test_two_hundred_thousand_events():
    play(200_000)
