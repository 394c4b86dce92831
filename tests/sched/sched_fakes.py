"""A fake device for scheduler tests, and the same request served alone.

The next token is a hash of all tokens before it, read through the block tables from a shadow store: full groups give
the whole prefix, window groups its tail, recurrent groups a state that only exists where a chunk ended.  Any aliasing,
wrong hit, lost write, wrong resume or wrong table therefore changes the outputs.
"""

from collections import deque

import numpy as np

from afl.sched import REASONS, Aborted, Arrived, Policy, Sampled, check, init, step, tokens_for

VOCAB = 17


def fold(tokens, h=7):
    for t in tokens:
        h = (h * 31 + int(t) + 1) % 1_000_003
    return h


def next_token(tokens, groups=()):
    """What the model says after `tokens`."""
    total = 0
    for g in groups or (None,):
        total += fold(tokens[-g.window:]) if g is not None and g.kind == "window" else fold(tokens)
    return total % VOCAB


def alone(request, max_model_len, groups=()):
    """Outputs and finish of a request that has the machine to itself."""
    tokens, n = list(request.prompt), 0
    while True:
        if request.pooling:
            return [], "stop"
        t = next_token(tokens, groups)
        tokens.append(t)
        n += 1
        out = tokens[len(request.prompt):]
        if n >= request.min_tokens and (t in request.stop_ids or (t in request.eos_ids and not request.ignore_eos)):
            return out, "stop"
        if n >= request.max_tokens or len(tokens) >= max_model_len:
            return out, "length"
        if request.repeat and n >= request.min_tokens:
            a, b, k = request.repeat
            if any(len(out) >= p * k and out[-p * k:] == out[-p:] * k for p in range(a, b + 1)):
                return out, "repetition"


class Device:
    """Runs plans in order.  `store[g][block, offset]` is the token last written there, `state[g][block]` a hash."""

    def __init__(self, config, luck=0.5):
        self.config, self.luck = config, luck
        self.store = [np.full((config.blocks + 1, g.block_tokens), -1) for g in config.groups]
        self.state = [np.full(config.blocks + 1, -1) for _ in config.groups]
        self.last = np.full(config.max_seqs, -1)
        self.rejected = {}                             # (row, step) -> drafts of that plan that were wrong
        self.host = {}                                 # (group part, host block) -> content
        self.rng = np.random.default_rng(5)

    def run(self, state, plan):
        """(tokens, count) of the plan; count is None without speculation."""
        c = self.config
        self.copy(plan)
        if not len(plan.rows):
            return None
        flat = tokens_for(state, plan)
        assert plan.tokens <= c.max_step_tokens and len(flat) == plan.tokens
        assert len(set(plan.rows)) == len(plan.rows) and len(set(plan.ids)) == len(plan.ids)
        out, count = np.full((len(plan.rows), 1 + c.drafts), -9), np.ones(len(plan.rows), np.int32)
        unseen = [p.step for p in state.inflight[:-1]]
        work, first = [], 0
        for i, row in enumerate(plan.rows.tolist()):
            n = int(plan.grant[i])
            given, first = flat[first : first + n].tolist(), first + n
            start = int(plan.start[i]) - sum(self.rejected.get((row, k), 0) for k in unseen)
            real = n - int(plan.drafts[i])
            tokens = [self.last[row] if t < 0 else t for t in given[:real]]
            assert plan.kv_len[i] < c.max_model_len
            prefix = self.prefix(plan, i, start) + tokens
            for _ in range(int(plan.drafts[i])):        # proposals: right now and then
                wrong = 0 if self.rng.random() < self.luck else 1 + int(self.rng.integers(VOCAB - 1))
                guess = (next_token(prefix, c.groups) + wrong) % VOCAB
                prefix.append(guess)
                tokens.append(guess)
            work.append((i, row, start, tokens, real))
        entry = [self.entry_state(plan, i, start) for i, _, start, _, _ in work]      # states before anybody writes
        for i, _, start, tokens, _ in work:             # all writes of a step come before its reads
            self.write(plan, i, start, tokens)
        for (i, row, start, tokens, real), before in zip(work, entry, strict=True):
            said = [self.read(plan, i, start, tokens, k, before) for k in range(real - 1, len(tokens))]
            self.end_state(plan, i, start, tokens, before)
            if not plan.emit[i]:
                continue
            n = 0
            while n < len(tokens) - real and tokens[real + n] == said[n]:
                n += 1
            out[i, : n + 1], count[i] = said[: n + 1], n + 1
            self.last[row] = said[n]
            self.rejected[row, plan.step] = int(plan.drafts[i]) - n
        return (out, count) if c.drafts else (out[:, 0], None)

    def copy(self, plan):
        for d, h in zip(plan.out.device.tolist(), plan.out.host.tolist(), strict=True):
            self.host[h] = [x[d].copy() for x in (*self.store, *self.state)]
        for d, h in zip(plan.back.device.tolist(), plan.back.host.tolist(), strict=True):
            for x, value in zip((*self.store, *self.state), self.host[h], strict=True):
                x[d] = value

    def load(self, load, tokens, groups):
        """Fill the blocks of a load as another machine would have."""
        for g, spec in enumerate(groups):
            size = spec.block_tokens
            for p in range(load.stop):
                block = load.blocks[g][p // size] if p // size < len(load.blocks[g]) else 0
                if p >= load.start and block:
                    self.store[g][block, p % size] = tokens[p]
            if spec.kind == "recurrent":
                self.state[g][load.blocks[g][(load.stop - 1) // size]] = fold(tokens[: load.stop])

    def prefix(self, plan, i, start):
        """The first `start` tokens of a row as some full group has them; without one, what was written last."""
        for g, spec in enumerate(self.config.groups):
            if spec.kind == "full":
                at = np.arange(start)
                return self.store[g][plan.blocks[g][i][at // spec.block_tokens], at % spec.block_tokens].tolist()
        return []

    def write(self, plan, i, start, tokens):
        for g, spec in enumerate(self.config.groups):
            if spec.kind != "recurrent":
                at = np.arange(start, start + len(tokens))
                blocks = plan.blocks[g][i][at // spec.block_tokens]
                assert (blocks > 0).all(), "a write into the null block"
                self.store[g][blocks, at % spec.block_tokens] = tokens

    def entry_state(self, plan, i, start):
        return [
            (int(self.state[g][plan.blocks[g][i][(start - 1) // s.block_tokens]]) if start else 7)
            if s.kind == "recurrent" else None for g, s in enumerate(self.config.groups)]

    def end_state(self, plan, i, start, tokens, before):
        for g, spec in enumerate(self.config.groups):
            if spec.kind == "recurrent":
                block = plan.blocks[g][i][(start + len(tokens) - 1) // spec.block_tokens]
                assert block > 0, "a state written into the null block"
                self.state[g][block] = fold(tokens, before[g])

    def read(self, plan, i, start, tokens, k, before):
        """What the model says after token k of the chunk."""
        total, end = 0, start + k + 1
        for g, spec in enumerate(self.config.groups):
            if spec.kind == "recurrent":
                total += fold(tokens[: k + 1], before[g])
                continue
            low = max(0, end - spec.window) if spec.kind == "window" else 0
            at = np.arange(low, end)
            total += fold(self.store[g][plan.blocks[g][i][at // spec.block_tokens], at % spec.block_tokens])
        return total % VOCAB


class Run:
    """Drives a scheduler over a fake device with `depth` plans in flight, checking every state."""

    def __init__(self, config, depth=1, policy=Policy(), log=None, luck=0.5):  # noqa: B008
        self.state, self.depth, self.policy = init(config, policy), depth, policy
        self.device = Device(self.state.config, luck)
        self.flight, self.tokens, self.finish, self.plans = deque(), {}, {}, []
        self.refused, self.log, self.steps, self.loads = {}, log, 0, []
        self.emitted_since_preempt, self.sessions = {}, set()

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
        self.sessions |= {e.request.id for e in events if isinstance(e, Arrived) and e.request.session}
        self.state, plan, outputs = step(self.state, events, self.policy)
        self.steps += 1
        check(self.state)
        for id, token, finish in outputs.rows():
            if id in self.finish and id in self.sessions:
                del self.finish[id]
            assert id not in self.finish, "something after the finish"
            if token >= 0:
                self.tokens.setdefault(id, []).append(token)
                self.emitted_since_preempt[id] = True
            if finish:
                self.finish[id] = finish
        self.refused |= dict(outputs.refused)
        for id, n in before.items():
            ticket = self.state.tickets.get(id)
            if ticket and ticket.preempts > n:                       # A07
                shared = self.state.config.sliding and self.state.config.prefix_cache
                assert self.emitted_since_preempt.get(id) or shared, f"{id} preempted without a token since admission"
                self.emitted_since_preempt[id] = False
        if plan is not None:
            self.plans.append(plan)
            self.loads += plan.loads
            made = self.device.run(self.state, plan)
            if made is not None:
                self.flight.append(Sampled(plan.step, *made))
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
    c = run.state.config
    for r in requests:
        if r.id not in run.refused:
            assert run.result(r.id) == alone(r, c.max_model_len, c.groups), r.id


assert REASONS[0] == ""
