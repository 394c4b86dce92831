"""A fake device for scheduler tests, and the same request served alone.

The next token is a hash of all tokens before it, read through the block table from a shadow store.  Any aliasing,
lost write, wrong resume or wrong table therefore changes the outputs.
"""

from collections import deque

import numpy as np

from afl.sched import REASONS, Aborted, Arrived, Policy, Sampled, check, init, step, tokens_for

VOCAB = 17


def next_token(tokens):
    h = 7
    for t in tokens:
        h = (h * 31 + int(t) + 1) % 1_000_003
    return h % VOCAB


def alone(request, max_model_len):
    """Outputs and finish of a request that has the machine to itself."""
    tokens, n = list(request.prompt), 0
    while True:
        t = next_token(tokens)
        tokens.append(t)
        n += 1
        if n >= request.min_tokens and (t in request.stop_ids or (t in request.eos_ids and not request.ignore_eos)):
            return tokens[len(request.prompt):], "stop"
        if n >= request.max_tokens or len(tokens) >= max_model_len:
            return tokens[len(request.prompt):], "length"


class Device:
    """Runs plans in order.  `store[block, offset]` is the token last written there."""

    def __init__(self, config):
        self.config = config
        self.store = np.full((config.blocks + 1, config.block_tokens), -1)
        self.last = np.full(config.max_seqs, -1)

    def run(self, state, plan):
        c, out, flat = self.config, np.full(len(plan.rows), -9), tokens_for(state, plan)
        assert plan.tokens <= c.max_step_tokens and len(flat) == plan.tokens
        assert len(set(plan.rows)) == len(plan.rows) and len(set(plan.ids)) == len(plan.ids)
        first = 0
        for i, row in enumerate(plan.rows):
            position = np.arange(plan.start[i], plan.kv_len[i])
            tokens = flat[first : first + len(position)]
            first += len(position)
            tokens = np.where(tokens < 0, self.last[row], tokens)
            blocks = plan.blocks[i]
            at = blocks[position // c.block_tokens]
            assert (at > 0).all(), "a write into the null block"
            assert plan.kv_len[i] < c.max_model_len
            self.store[at, position % c.block_tokens] = tokens
            seen = np.arange(plan.kv_len[i])
            all_tokens = self.store[blocks[seen // c.block_tokens], seen % c.block_tokens]
            if plan.emit[i]:
                out[i] = self.last[row] = next_token(all_tokens)
        return out


class Run:
    """Drives a scheduler over a fake device with `depth` plans in flight, checking every state."""

    def __init__(self, config, depth=1, policy=Policy(), log=None):  # noqa: B008
        self.state, self.device, self.depth, self.policy = init(config, policy), Device(config), depth, policy
        self.flight, self.tokens, self.finish, self.plans = deque(), {}, {}, []
        self.refused, self.log, self.steps = {}, log, 0
        self.emitted_since_preempt = {}

    def step(self, *events):
        """One engine iteration: collect the oldest result if the pipe is full, plan, run."""
        events = list(events)
        if len(self.flight) == self.depth:
            events.append(self.flight.popleft())
        plan = self._step(events)
        if plan is None and self.flight:
            plan = self._step([self.flight.popleft()])
        return plan

    def _step(self, events):
        if self.log:
            self.log.write(events)
        before = {id: t.preempts for id, t in self.state.tickets.items()}
        self.state, plan, outputs = step(self.state, events, self.policy)
        self.steps += 1
        check(self.state)
        for id, token, finish in outputs.rows():
            assert id not in self.finish, "a token after the finish"
            if token >= 0:
                self.tokens.setdefault(id, []).append(token)
                self.emitted_since_preempt[id] = True
            if finish:
                self.finish[id] = finish
        self.refused |= dict(outputs.refused)
        for id, n in before.items():
            ticket = self.state.tickets.get(id)
            if ticket and ticket.preempts > n:                       # A07
                assert n == 0 or self.emitted_since_preempt.get(id), f"{id} preempted twice without a token between"
                self.emitted_since_preempt[id] = False
        if plan is not None:
            self.plans.append(plan)
            self.flight.append(Sampled(plan.step, self.device.run(self.state, plan)))
        return plan

    def drain(self, bound=10_000):
        """Step until nothing is left to do."""
        n = 0
        while self.state.busy:
            self.step()
            n += 1
            assert n < bound, f"no progress:\n{self.state.frame()}"
        return self

    def submit(self, *requests):
        return self.step(*(Arrived(r) for r in requests))

    def abort(self, *ids):
        return self.step(*(Aborted(i) for i in ids))

    def result(self, id):
        return self.tokens.get(id, []), self.finish.get(id, "")


def expect_alone(run, requests):
    """Every finished request has the outputs that it would have alone."""
    for r in requests:
        if r.id not in run.refused:
            assert run.result(r.id) == alone(r, run.state.config.max_model_len), r.id


assert REASONS[0] == ""
