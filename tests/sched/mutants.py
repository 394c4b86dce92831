"""Seeded bugs: (file under afl/sched, what stands there, the bug).  `test_mutants` shows that all are caught."""

MUTANTS = [
    # the pool
    ("pool.py", "links[2 * m + b] -= 1\n        n += 1\n        if links[2 * m + b] == 0:",
     "links[2 * m + b] -= 1\n        n += 1\n        if links[2 * m + b] >= 0:"),                 # freed though held
    ("pool.py", "before, after = links[m], 0\n            else:", "before, after = 0, links[0]\n            else:"),
    ("pool.py", "        links[2 * m + b] += 1\n", "        links[2 * m + b] = 1\n"),          # a holder is not counted
    ("pool.py", "for b in gone:\n            blocks = blocks.delete(names[b])\n        names = self.names.set(gone",
     "for b in gone[1:]:\n            blocks = blocks.delete(names[b])\n        names = self.names.set(gone"),
    ("pool.py", "key not in new and block not in taken and named[block] is None",
     "key not in new and block not in taken"),
    ("pool.py", "if known(key) is None and", "if"),                                        # a name for two blocks
    ("pool.py", "self.free - revived",
     "self.free"),  # revived blocks count as free
    # hits and names
    ("admit.py", "s.config.unit, len(t.tokens) - 1, s.step)", "s.config.unit, len(t.tokens), s.step)"),  # wrong hit cap
    ("hits.py", "if at and groups[g].kind == \"recurrent\" and born[at] == step + 1 else at", "if False else at"),
    ("hits.py", "while length and length != before:", "while length and before < 0:"),     # one round only
    ("hits.py", "        if block(n - run - 1):", "        if run or block(n - run - 1):"),
    ("hashing.py", "parent = digest.digest()[:16]", "parent = sha256(raw[i * step : (i + 1) * step]).digest()[:16]"),
    ("hashing.py", "salt.encode(), str(weights)", "b'', str(weights)"),                    # the salt is forgotten
    ("hashing.py", "adapter.encode(), str(adapter_version).encode()", "adapter.encode(), b''"),
    ("hashing.py", "        if items:\n", "        if not items:\n"),
    ("naming.py", "full = min(int(s.sched[row]), int(s.tokens.lengths[row])) // s.config.unit",
     "full = -(-min(int(s.sched[row]), int(s.tokens.lengths[row])) // s.config.unit)"),    # names a block half full
    ("naming.py", "np.where(s.status > 0, SEALED, s.hashed)", "np.where(s.status > 9, SEALED, s.hashed)"),
    ("step.py", "evolve(seal(s), weights=", "evolve(s, weights="),                         # old names stay
    # windows
    ("loops.py", "past = done[i] - windows[g] + 1 if", "past = done[i] - windows[g] + 2 if"),
    ("results.py", "done = (s.sched - flying(s))[rows]", "done = s.sched[rows]"),              # lost fence of a window
    ("results.py", "s = _truncate(s, row, tokens)\n",
     "s = s\n"),  # blocks of a failed load stay
    ("results.py", "tokens = local if c.sliding else max(",
     "tokens = max("),  # partial loads are believed
    ("results.py", "status[row], sched[row] = RUNNING, tokens", "status[row], sched[row] = RUNNING, promised"),
    # fences and rows
    ("rows.py", "return next((p.step for p in reversed(s.inflight) if (p.rows == row).any()), 0)", "return 0"),
    ("rows.py", "due = [row for fence, row in s.away if fence < oldest]",
     "due = [row for fence, row in s.away if fence <= oldest]"),
    ("rows.py", "if column[row] in (RUNNING, LOADING):", "if column[row] == RUNNING:"),
    ("rows.py", "if not filling and not t.request.readers:", "if not t.request.readers:"),
    ("rows.py", "if reader is not None and len(seen) < pin.readers:",
     "if False:"),  # freed after the first reader
    ("rows.py", "pin.seen | {reader}", "pin.seen | {len(pin.seen)}"),                        # a reader counts twice
    ("rows.py", "preempts=ticket.preempts + 1, computed=done", "preempts=ticket.preempts, computed=done"),
    ("rows.py", "known, done = s.tokens[row].copy()",
     "known, done = s.tokens[row][:-1].copy()"),  # resumes one token short
    # budgets, chunks, drafts
    ("loops.py", "        budget -= grant[i]\n",
     "        budget -= grant[i] - given[i]\n"),  # drafts cost nothing
    ("loops.py", "        k = min(capped[i], budget)\n", "        k = min(capped[i], budget + 1)\n"),
    ("loops.py", "min(most, limit[row] - want[i] - 1)", "min(most, limit[row] - want[i])"),
    ("loops.py", "emit[i] = k > 0 and start + k == want[i]", "emit[i] = k > 0"),              # samples in mid prompt
    ("loops.py", "out[rows[i]] += emit[i] * (1 + drafts[i])", "out[rows[i]] += emit[i]"),
    ("loops.py", "elif needs_host[row] and pend[row] > 0:", "elif needs_host[row] and pend[row] > 9:"),
    ("loops.py", "            if start % align and whole < end:", "            if False:"),
    ("loops.py", "            elif start < junction[row] < end:\n                end = junction[row]\n            elif",
     "            if"),                                                                    # junctions are passed over
    ("loops.py", "            elif start < last < end:\n                end = last\n", ""),
    ("results.py", "sched[plan.at] -= lost", "sched[plan.at] -= 0 * lost"),                   # rejected drafts count
    ("results.py", "keep = keep & (s.status[rows] != ENDED)", "keep = keep & (s.status[rows] != 99)"),
    # stops
    ("loops.py", "            if total >= floor[row]:\n",
     "            if total > floor[row]:\n"),  # min_tokens off by one
    ("loops.py", "if code == 0 and total >= limit[row]:", "if code == 0 and total > limit[row]:"),
    ("loops.py", "while n < count[i] and code == 0:", "while n < count[i]:"),                   # tokens behind a stop
    ("results.py", "for n in range(shortest, longest + 1))", "for n in range(shortest, longest))"),
    # admission and preemption
    ("admit.py", "        if blocks > spare:", "        if blocks > spare + 1:"),
    ("admit.py", "    if s.preempting:\n", "    if False:\n"),
    ("admit.py", "spare, running = spare - blocks, running + 1", "spare, running = spare, running + 1"),
    ("grants.py", "if wants[r] > s.base[r]] or able", "] or able"),                           # victims without progress
    ("grants.py", "self.spare += granted + self.owed.pop(row)", "self.spare += self.owed.pop(row)"),   # a lost refund
    ("grants.py", "            budget += tokens\n", ""),
    ("grants.py", "        if fence_of(self.s, row):\n            self.coming += blocks",
     "        if False:\n            self.coming += blocks"),
    ("policies/fcfs.py", "return rows[-1]", "return rows[0]"),                                # the oldest is the victim
    ("policies/priority.py", "s.priority[rows]))[-1]]", "s.priority[rows]))[0]]"),
    ("arrivals.py", "need = sum(c.most(total - 1))", "need = 0 * sum(c.most(total - 1))"),   # what never fits comes in
    ("arrivals.py", "        s = enqueue(s, ticket)\n        return evolve(s, queue=swept",
     "        return evolve(s, queue=swept"),
    ("arrivals.py", "keep = ticket.tokens[: len(ticket.tokens) - (len(ticket.tokens) > len(ticket.request.prompt))]",
     "keep = ticket.tokens"),
    ("arrivals.py", "while (entry := alarms.head()) and entry[0] <= s.now:",
     "while (entry := alarms.head()) and entry[0] < s.now:"),
    ("step.py", "if s.pause == \"keep\":", "if s.pause == \"never\":"),
    ("step.py", "admits and not s.pause", "admits"),
    ("step.py", "(late if e.id in new else aborts).append(e)", "aborts.append(e)"),
    # swapping
    ("admit.py", "hosts = hosts.drop(copies.host)", "pass"),                                 # host blocks are lost
    ("rows.py", "host=host, lost_remote=True", "host=host[:0], lost_remote=True"),
    # every policy and gate replaced by first come, first served
    ("policies/shortest.py", "params[\"seconds_per_token\"] * missing", "0 * missing"),
    ("policies/shortest.py", "missing -= found.tokens", "missing -= 0 * found.tokens"),
    ("policies/deadline.py", "r.deadline)\n\n\ndef admit", "0.0)\n\n\ndef admit"),
    ("policies/decode_first.py", "s.sched[rows] < s.base[rows], kind", "s.sched[rows] < 0, kind"),
    ("policies/decode_first.py", "    if not most:\n", "    if most:\n"),
    ("policies/prefill_first.py", "np.where(prompt, left, 0)", "np.where(prompt, left, left)"),
    ("policies/watermark.py", "if c.running and", "if False and"),
    ("policies/growth.py", "    if need > config.blocks:", "    if False:"),
    ("policies/balance.py", "if max(peers.running) >= cap else None", "if False else None"),
    ("policies/balance.py", "if used > most else None", "if False else None"),
    ("policies/recompute.py", "return \"swap\" if swap_seconds", "return \"recompute\" if swap_seconds"),
    ("policies/profiling.py", "    if quad is None:", "    if True:"),
    ("policies/profiling.py", "SHARES = (1 / 16, 1.0, 1 / 4)", "SHARES = (1.0, 1.0, 1.0)"),
    ("policies/profiling.py", "    stratum = int(log2(tokens)), int(log2(history / 1024 + 1))", "    stratum = 0, 0"),
    ("policies/profiling.py", "event.step, before.add", "event.step, Moments().add"),
    ("policies/growth.py", ") - shared(c)", ")"),
    ("policies/recompute.py", "    kept = still_cached(s, row)", "    kept = 0"),
    ("timing.py", "(slope * slope + 4 * quad.a * ms)", "(slope * slope + 2 * quad.a * ms)"),
]
