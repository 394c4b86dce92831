"""Admit only what can grow: simulate the blocks of all that runs plus the candidate for some steps ahead.

A request grows a token per step until it is expected to end.  Usage changes only where a request enters a new block or
ends, so only those steps are looked at.

growth_steps     how far ahead to look
expected_output  tokens that a request is expected to yield, as a share of its max_tokens
"""

import numpy as np

from afl.sched import notes
from afl.sched.policies.registry import register
from afl.sched.policy import Verdict

notes.TEXT["growth"] = "with it the requests would need {a} blocks within the horizon, there are {b}"


def admit(c, params):
    """Object if blocks would run out within the horizon."""
    s, rows, config = c.s, c.s.running, c.s.config
    if not c.running:
        return None
    length = np.append(s.tokens.lengths[rows], len(c.ticket.tokens)).astype(np.int64)
    limit = np.append(s.limit[rows], c.ticket.limit).astype(np.int64)
    prompt = np.append(s.floor[rows], c.ticket.floor).astype(np.int64)          # min_tokens count as prompt
    total = np.minimum(prompt + np.ceil((limit - prompt) * params["expected_output"]).astype(np.int64), limit)
    left = np.maximum(total - length, 1)
    need = sum(peak(length, left, params["growth_steps"], g.block_tokens, most)
               for g, most in zip(config.groups, config.most(config.max_model_len), strict=True)) - shared(c)
    if need > config.blocks:
        return Verdict("growth", need, config.blocks)


def peak(length, left, horizon, block, most):
    """Most blocks of a group in use over steps 0..horizon: row i has length[i] + t tokens at step t <= left[i], none
    afterwards, and never more than `most` blocks (windows and states give back what they left behind).

    >>> import numpy as np
    >>> peak(np.array([60, 64]), np.array([10, 20]), 100, 16, 99)
    10
    """
    steps = {0, horizon}
    for n, r in zip(length.tolist(), left.tolist(), strict=True):
        first = (-n) % block + 1
        steps.update(range(first, min(r, horizon) + 1, block))
        steps.add(min(r, horizon))
    at = np.array(sorted(t for t in steps if t <= horizon))
    blocks = np.minimum(-(-(length[:, None] + at) // block), most) * (left[:, None] >= at)
    return int(blocks.sum(0).max())


def shared(c):
    """Blocks that several running requests hold, counted once too often."""
    refs = c.s.pool.part(2)
    return int((refs[refs > 1] - 1).sum())


register("growth", admit=admit, params={"growth_steps": 256, "expected_output": 1.0})
