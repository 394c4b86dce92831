"""A naive object-level scheduler with the same semantics, one Python object per request: the oracle for the columns."""

import attrs


@attrs.define(eq=False)
class Req:
    request: object
    number: int
    tokens: list
    state: str = "waiting"            # waiting, running, leaving, ended
    sched: int = 0
    blocks: int = 0
    promise: int = 0
    base: int = 0
    preempts: int = 0
    pending: int = 0                  # recounted before each use
    fence: int = 0


class Reference:
    """fcfs; `step` takes (aborted ids, sampled tokens or None, arrivals) and returns (plan, outputs)."""

    def __init__(self, config, threshold=0):
        self.c, self.threshold, self.step_number, self.count = config, threshold, 0, 0
        self.waiting, self.running, self.away, self.inflight = [], [], [], []
        self.free, self.dropped, self.preemptions = config.blocks, 0, 0

    def step(self, aborts=(), sampled=None, arrivals=()):
        out = []
        for id in dict.fromkeys(aborts):
            for r in self.waiting + self.running + [a for a in self.away if a.state == "leaving"]:
                if r.request.id == id:
                    out.append((id, -1, "abort"))
                    self.end(r)
        if sampled is not None:
            out += self.observe(sampled)
        for q in arrivals:
            total = min(len(q.prompt) + q.max_tokens, self.c.max_model_len)
            if len(q.prompt) < self.c.max_model_len and self.cdiv(total - 1) <= self.c.blocks:
                self.count += 1
                self.waiting.append(Req(q, self.count, list(q.prompt)))
        return self.schedule(), out

    def cdiv(self, n):
        return -(-n // self.c.block_tokens)

    def limit(self, r):
        return min(len(r.request.prompt) + r.request.max_tokens, self.c.max_model_len)

    def end(self, r):
        if r in self.waiting:
            self.waiting.remove(r)
        elif r in self.running:
            self.leave(r, "ended")
        r.state = "ended"
        self.sweep()

    def leave(self, r, state):
        self.running.remove(r)
        self.away.append(r)
        r.state = state
        r.fence = max([n for n, plan in self.inflight if any(x[0] is r for x in plan)], default=0)

    def sweep(self):
        oldest = self.inflight[0][0] if self.inflight else self.step_number + 1
        for r in [r for r in self.away if r.fence < oldest]:
            self.away.remove(r)
            self.free += r.blocks
            if r.state == "leaving":
                r.state, r.sched, r.blocks, r.preempts = "waiting", 0, 0, r.preempts + 1
                self.waiting = sorted([*self.waiting, r], key=lambda w: w.number)

    def observe(self, sampled):
        _, plan = self.inflight.pop(0)
        out = []
        for (r, _, _, emit), token in zip(plan, sampled, strict=True):
            if not emit:
                continue
            if r.state == "ended":
                self.dropped += 1
                continue
            q, token = r.request, int(token)
            r.tokens.append(token)
            outputs, why = len(r.tokens) - len(q.prompt), ""
            if outputs >= q.min_tokens and (token in q.stop_ids or (token in q.eos_ids and not q.ignore_eos)):
                why = "stop"
            elif len(r.tokens) >= self.limit(r):
                why = "length"
            out.append((q.id, token, why))
            if why:
                self.end(r)
        self.sweep()
        return out

    def owed(self):
        return sum(max(0, r.promise - r.blocks) for r in self.running)

    def schedule(self):
        budget, plan, preempted = self.c.max_step_tokens, [], False
        coming = sum(r.blocks for r in self.away)
        lent = 0                                                  # free blocks kept for rows that wait for a fence
        start_blocks = {id(r): r.blocks for r in self.running}
        for r in list(self.running):
            r.pending = sum(1 for _, p in self.inflight for x in p if x[0] is r and x[3])
        for r in list(self.running):
            if r.state != "running":
                continue
            want = len(r.tokens) + r.pending
            n = min(want - r.sched, budget, self.threshold or 10**9)
            if want >= self.limit(r) or (r.request.needs_host and r.pending) or n <= 0:
                continue
            ok = False
            while True:
                extra = max(0, self.cdiv(r.sched + n) - max(r.blocks, r.promise))
                spare = self.free - self.owed() - lent
                if extra <= spare:
                    ok = True
                    break
                if extra <= spare + coming:
                    lent += spare
                    coming -= extra - spare
                    break
                victim = [v for v in self.running
                          if not v.preempts or len(v.tokens) + v.pending > v.base][-1]
                preempted = True
                self.preemptions += 1
                for x in [x for x in plan if x[0] is victim]:     # give back what this step had granted
                    plan.remove(x)
                    budget += x[2]
                    victim.sched -= x[2]
                self.free += victim.blocks - start_blocks[id(victim)]
                victim.blocks = start_blocks[id(victim)]
                self.leave(victim, "leaving")
                if victim.fence:
                    coming += victim.blocks
                self.sweep()
                if victim is r:
                    break
            if ok:
                plan.append((r, r.sched, n, r.sched + n == want))
                grow = max(0, self.cdiv(r.sched + n) - r.blocks)
                r.blocks, self.free, r.sched, budget = r.blocks + grow, self.free - grow, r.sched + n, budget - n
        if not preempted and not any(r.state == "leaving" for r in self.away):
            while self.waiting and budget and len(self.running) + len(self.away) < self.c.max_seqs:
                r = self.waiting[0]
                if self.cdiv(len(r.tokens)) > self.free - self.owed() - lent:
                    break
                self.running.append(self.waiting.pop(0))
                n = min(len(r.tokens), budget, self.threshold or 10**9)
                r.state, r.base, r.promise, r.sched = "running", len(r.tokens), self.cdiv(len(r.tokens)), n
                r.blocks = self.cdiv(n)
                self.free -= r.blocks
                budget -= n
                plan.append((r, 0, n, n == len(r.tokens)))
        if plan:
            self.step_number += 1
            self.inflight.append((self.step_number, plan))
        return [(r.request.id, start, n, emit) for r, start, n, emit in plan]
