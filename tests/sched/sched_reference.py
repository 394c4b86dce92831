"""A naive object-level scheduler with the same semantics, one Python object per request: the oracle for the columns.

Everything is recounted from plain lists whenever it is needed.  Prefixes are known by their tokens, not by hashes.
"""

import attrs


@attrs.define(eq=False)
class Req:
    request: object
    number: int
    tokens: list
    priority: int = 0
    state: str = "waiting"            # waiting, running, leaving, ended
    sched: int = 0
    tables: list = attrs.field(factory=list)      # per group: block per entry, 0 = none
    promise: list = attrs.field(factory=list)     # per group
    named: int = 0                    # units that got a name
    base: int = 0
    junction: int = 0
    preempts: int = 0
    computed: int = 0
    fence: int = 0


@attrs.define(eq=False)
class Entry:
    req: Req
    start: int
    n: int
    drafts: int
    emit: bool


class Reference:
    """fcfs or priority; `step` takes (aborted ids, (tokens, count) or None, arrivals) and returns (plan, outputs)."""

    def __init__(self, config, threshold=0, order="fcfs", watermark=0.0):
        self.c, self.threshold, self.order, self.watermark = config, threshold, order, watermark
        self.number = self.count = self.dropped = self.preemptions = self.recomputed = self.hits = 0
        self.waiting, self.running, self.away, self.inflight = [], [], [], []
        self.free = list(range(1, config.blocks + 1))
        self.refs, self.names, self.born = {b: 0 for b in self.free}, {}, {}     # names: (group, tokens...) -> block

    def step(self, aborts=(), sampled=None, arrivals=()):
        out = []
        for id in dict.fromkeys(aborts):
            for r in self.waiting + self.running + [a for a in self.away if a.state == "leaving"]:
                if r.request.id == id:
                    out.append((id, -1, "abort"))
                    self.end(r)
        if sampled is not None:
            out += self.observe(*sampled)
        for q in arrivals:
            total = min(len(q.prompt) + q.max_tokens, self.c.max_model_len)
            if len(q.prompt) < self.c.max_model_len and sum(self.c.most(total - 1)) <= self.c.blocks:
                self.count += 1
                self.waiting.append(Req(q, self.count, list(q.prompt), q.priority))
        return self.schedule(), out

    # ---- blocks

    def take(self):
        b = self.free.pop(0)
        for key in [k for k, v in self.names.items() if v == b]:
            del self.names[key]
        self.refs[b] = 1
        return b

    def drop(self, b):
        self.refs[b] -= 1
        if self.refs[b] == 0:
            self.free.insert(len(self.free) if b in self.names.values() else 0, b)

    def name(self, r, step):
        if not self.c.prefix_cache:
            return
        unit = self.c.unit
        full = min(r.sched, len(r.tokens)) // unit
        for g, spec in enumerate(self.c.groups):
            size = spec.block_tokens
            for end in range(size, full * unit + 1, size):
                if end <= r.named * unit or end // size > len(r.tables[g]):
                    continue
                b, key = r.tables[g][end // size - 1], (g, r.request.salt, *r.tokens[:end])
                if b and key not in self.names and b not in self.names.values():
                    self.names[key], self.born[b] = b, step
        r.named = max(r.named, full)

    def hit(self, r):
        """The longest prefix for which every group has its blocks, tried from long to short."""
        if not self.c.prefix_cache:
            return 0, None, 0
        unit, salt, tokens = self.c.unit, r.request.salt, r.tokens
        most = (len(tokens) - 1) // unit * unit

        def found(g, length):
            spec = self.c.groups[g]
            size, blocks = spec.block_tokens, []
            if length % size:
                return None
            low = {"full": 0, "window": max(0, length - spec.window + 1) // size,
                   "recurrent": length // size - 1}[spec.kind]
            for i in range(length // size):
                b = self.names.get((g, salt, *tokens[: (i + 1) * size]), 0) if i >= low else 0
                if b and spec.kind == "recurrent" and self.born[b] == self.number + 1:
                    b = 0
                if i >= low and not b:
                    return None
                blocks.append(b)
            return blocks

        lengths = range(most, 0, -unit)
        first = max((n for n in lengths if found(0, n) is not None), default=0)
        for n in lengths:
            tables = [found(g, n) for g in range(len(self.c.groups))]
            if all(t is not None for t in tables):
                return n, tables, first if first > n else 0
        return 0, None, first

    def new_blocks(self, r, end):
        """Per group the entries of the table that a grant up to `end` fills."""
        out = []
        for g, spec in enumerate(self.c.groups):
            have, stop = len(r.tables[g]), -(-end // spec.block_tokens)
            out.append(list(range(stop - 1 if spec.kind == "recurrent" and stop > have else have, stop)))
        return out

    def grow(self, r, end):
        for g, entries in enumerate(self.new_blocks(r, end)):
            for i in entries:
                r.tables[g] += [0] * (i - len(r.tables[g])) + [self.take()]

    def owed(self, r, more=None, sched=None):
        if (r.sched if sched is None else sched) >= r.base:
            return 0
        more = more or [[]] * len(self.c.groups)
        entries = [-(-r.base // g.block_tokens) - max(len(t), m[-1] + 1 if m else 0)
                   for g, t, m in zip(self.c.groups, r.tables, more, strict=True)]
        return sum(max(0, min(p - sum(b > 0 for b in t) - len(m), e))
                   for p, t, m, e in zip(r.promise, r.tables, more, entries, strict=True))

    # ---- life

    def limit(self, r):
        return min(len(r.request.prompt) + r.request.max_tokens, self.c.max_model_len)

    def end(self, r):
        if r in self.waiting:
            self.waiting.remove(r)
        elif r in self.running:
            self.name(r, self.number)
            self.leave(r, "ended")
        r.state = "ended"
        self.sweep()

    def leave(self, r, state):
        self.running.remove(r)
        self.away.append(r)
        r.state = state
        r.fence = max([n for n, plan in self.inflight if any(x.req is r for x in plan)], default=0)

    def sweep(self):
        oldest = self.inflight[0][0] if self.inflight else self.number + 1
        due = [r for r in self.away if r.fence < oldest]
        for r in due:
            self.name(r, self.number)
        for r in due:
            self.away.remove(r)
            if r.state == "leaving":
                r.state, r.preempts, r.computed = "waiting", r.preempts + 1, min(r.sched, len(r.tokens))
                self.waiting.append(r)
        for r in due:
            for table in r.tables:
                for b in reversed([b for b in table if b]):
                    self.drop(b)
            r.sched, r.tables, r.named = 0, [], 0

    def observe(self, tokens, count):
        _, plan = self.inflight.pop(0)
        out, ended = [], []
        for k, x in enumerate(plan):
            r, q = x.req, x.req.request
            mine = [int(t) for t in (tokens[k] if count is not None else tokens[k : k + 1])]
            n = 1 if count is None else int(count[k])
            if not x.emit:
                continue
            r.sched -= x.drafts - (n - 1)
            if r.state == "ended":
                self.dropped += 1
                continue
            for token in mine[:n]:
                r.tokens.append(token)
                outputs, why = len(r.tokens) - len(q.prompt), ""
                if outputs >= q.min_tokens and (token in q.stop_ids or (token in q.eos_ids and not q.ignore_eos)):
                    why = "stop"
                elif len(r.tokens) >= self.limit(r):
                    why = "length"
                out.append((q.id, token, why))
                if why:
                    break
            if why:
                ended.append(r)
        for r in ended:
            if r in self.running:
                self.name(r, self.number)
                self.leave(r, "ended")
            r.state = "ended"
        self.sweep()
        self.give_back(plan)
        return out

    def give_back(self, plan):
        gone = []
        for x in plan:
            r = x.req
            if r.state != "running" or not r.tables:
                continue
            done = r.sched - sum(y.n for _, p in self.inflight for y in p if y.req is r)
            for g, spec in enumerate(self.c.groups):
                low = {"full": 0, "window": done - spec.window + 1, "recurrent": done - 1}[spec.kind]
                for i in range(min(max(low, 0) // spec.block_tokens, len(r.tables[g]))):
                    if r.tables[g][i]:
                        gone.append((r, g, i))
        if gone:
            for x in plan:
                if x.req.state == "running":
                    self.name(x.req, self.number)
        for r, g, i in reversed(gone):
            self.drop(r.tables[g][i])
            r.tables[g][i] = 0

    # ---- the plan

    def want(self, r):
        return len(r.tokens) + sum(1 + x.drafts for _, p in self.inflight for x in p if x.req is r and x.emit)

    def chunk(self, r, n):
        """Where a chunk of n tokens ends: at a state worth keeping."""
        align, start, end = self.c.cut, r.sched, r.sched + n
        if not align or start >= r.base:
            return n
        last = r.base // align * align
        if start % align and end > start // align * align + align:
            return align - start % align
        if start < r.junction < end:
            return r.junction - start
        if end < last:
            return end // align * align - start if end // align * align > start else n
        return last - start if start < last < end else n

    def freed(self, r, lost):
        n = 0
        for b in [b for t in r.tables for b in t if b]:
            lost[b] = lost.get(b, 0) + 1
            n += self.refs[b] == lost[b]
        return n

    def schedule(self):
        plan, victims, budget, spare = self.grants(strict=False)
        if spare < 0:                                             # not all that is wanted fits: row by row
            plan, victims, budget, spare = self.grants(strict=True)
        for v in victims:
            self.preemptions += 1
            self.leave(v, "leaving")
        self.number += 1
        self.sweep()
        entries = [x for x, _ in plan.values()]
        for x in entries:
            self.grow(x.req, x.req.sched + x.n)
            x.req.sched += x.n
        for x in entries:
            self.name(x.req, self.number)
        self.number -= 1
        if not victims and not any(r.state == "leaving" for r in self.away):
            entries += self.admit(budget, spare)
        if entries:
            self.number += 1
            self.inflight.append((self.number, entries))
        return [(x.req.request.id, x.start, x.n, x.drafts, x.emit, [list(t) for t in x.req.tables]) for x in entries]

    def grants(self, strict):
        """(plan, victims, budget left, blocks left); unless `strict`, blocks may run short."""
        c, budget, plan, victims, lost = self.c, self.c.max_step_tokens, {}, [], {}
        coming = sum(self.freed(r, lost) for r in self.away)
        own = {r: self.owed(r) for r in self.running}
        spare = len(self.free) - sum(own.values())
        for r in list(self.running):
            if r in victims:
                continue
            want = self.want(r)
            left = want - r.sched
            if want >= self.limit(r) or (r.request.needs_host and want > len(r.tokens)):
                continue
            n = min(left, budget, self.threshold or left)
            n = self.chunk(r, n) if n > 0 else 0
            if n <= 0:
                continue
            emit = r.sched + n == want
            able = emit and left == 1 and want > r.base and not r.request.needs_host
            drafts = max(0, min(c.drafts, self.limit(r) - want - 1, budget - n)) if able else 0
            for d in (drafts, 0):
                more = self.new_blocks(r, r.sched + n + d)
                need = sum(map(len, more)) + self.owed(r, more, r.sched + n) - own[r]
                if need <= spare or not strict:
                    break
            while strict and need > spare + coming and r not in victims:
                others = [v for v in self.running if v not in victims]
                able = [v for v in others if self.want(v) > v.base] or others
                victim = able[-1]
                if self.order == "priority":
                    victim = max(able, key=lambda v: (v.priority, v.request.arrival, v.number))
                back = plan.pop(victim, None)
                budget += back[0].n if back else 0
                gain = self.freed(victim, lost)
                spare += (back[1] if back else 0) + own.pop(victim)
                if any(x.req is victim for _, p in self.inflight for x in p):
                    coming += gain
                else:
                    spare += gain
                victims.append(victim)
            if r in victims:
                continue
            if strict and need > spare:
                coming, spare = coming - (need - max(spare, 0)), min(spare, 0)
                continue
            plan[r] = Entry(r, r.sched, n + d, d, emit), need
            budget, spare = budget - n - d, spare - need
        return plan, victims, budget, spare

    def admit(self, budget, spare):
        out = []
        keys = {"fcfs": lambda w: w.number, "priority": lambda w: (w.priority, w.request.arrival, w.number)}
        while self.waiting and len(self.running) + len(self.away) < self.c.max_seqs:
            r = min(self.waiting, key=keys[self.order])
            hit, tables, junction = self.hit(r)
            left = len(r.tokens) - hit
            n = min(left, budget, self.threshold or left)
            first = [0] * len(self.c.groups) if not hit else [
                next((i for i, b in enumerate(t) if b), len(t)) for t in tables]
            promise = [min(m, -(-len(r.tokens) // g.block_tokens) - f)
                       for m, g, f in zip(self.c.most(len(r.tokens)), self.c.groups, first, strict=True)]
            held = {b for t in tables or () for b in t if b and self.refs[b]}
            cost = sum(promise) - sum(1 for t in tables or () for b in t if b in held)
            if self.running and self.watermark and spare - cost < int(self.watermark * self.c.blocks):
                break
            if n < 1 or cost > spare:
                break
            spare -= cost
            self.waiting.remove(r)
            self.running.append(r)
            r.state, r.base, r.promise, r.sched = "running", len(r.tokens), promise, hit
            r.tables, r.named = tables or [[] for _ in self.c.groups], hit // self.c.unit
            r.junction = junction // self.c.align * self.c.align if self.c.align else 0
            for b in [b for t in r.tables for b in t if b]:
                if self.refs[b] == 0:
                    self.free.remove(b)
                self.refs[b] += 1
            if r.preempts:
                self.recomputed += max(0, r.computed - hit)
            else:
                self.hits += hit
            n = self.chunk(r, n)
            self.grow(r, hit + n)
            r.sched += n
            budget -= n
            self.number += 1
            self.name(r, self.number)
            self.number -= 1
            out.append(Entry(r, hit, n, 0, r.sched == len(r.tokens)))
        return out
