"""Decodes before prompts: rows that sample go first, so a long prompt never takes their tokens.

prompt_tokens_beside_decodes  most prompt tokens in a step that also decodes, 0 = no cap; bounds the time per token
"""

import numpy as np

from afl.sched.policies.registry import register


def select(s, rows, left, params):
    """Rows that want a single token first, each part in admission order."""
    order = np.argsort(s.sched[rows] < s.base[rows], kind="stable")
    return [(rows[order], left[order], True)]


def chunk(s, start, left, granted, params):
    """Prompts share what is allowed beside decodes."""
    most = params["prompt_tokens_beside_decodes"]
    if not most:
        return left
    running = s.running
    if not ((s.sched[running] >= s.base[running]) & (s.tokens.lengths[running] < s.limit[running])).any():
        return left
    if granted or len(left) == 1 and start[0] == 0:                  # a new request: what was given before it counts
        spent = sum(n for _, n in granted if n > 1 + s.config.drafts)
        return np.minimum(left, max(0, most - spent))
    prompt = left > 1 + s.config.drafts
    before = np.cumsum(np.where(prompt, left, 0)) - left
    return np.where(prompt, np.clip(most - before, 0, left), left).astype(np.int32)


register("decode_first", select=select, chunk=chunk, params={"prompt_tokens_beside_decodes": 0})
