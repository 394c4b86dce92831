"""Prompts before decodes, never both: a step is all prompts or all decodes.

For chips whose kernels for one phase are faster than those for a mixed step.  While prompts run or wait and can be
let in, decodes get nothing.
"""

import numpy as np

from afl.sched.policies.registry import register


def select(s, rows, left, params):
    """All prompts, running and waiting; if nothing comes of that, all decodes."""
    prompt = s.sched[rows] < s.base[rows]
    return [(rows, np.where(prompt, left, 0).astype(np.int32), True),
            (rows, np.where(prompt, 0, left).astype(np.int32), False)]


register("prefill_first", select=select)
