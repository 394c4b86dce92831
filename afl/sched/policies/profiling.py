"""Chunks of equal time: the longer the history, the fewer tokens, so that pipeline stages stay level.

A step may spend `chunk_ms` on prompts.  The time of a chunk follows a x^2 + (2 a L + b) x behind L computed tokens
(`afl/sched/timing.py`); a and b are given, or learned from `Timed` events by non-negative least squares over the last
`chunk_samples` steps, as soon as there are 8 with different histories.

chunk_ms       0: the time of max_step_tokens tokens without history
chunk_unit     chunks are multiples of this, as long as they are not the last
chunk_tail     the rest of a prompt goes along if it is at most this many times the chunk
chunk_a, chunk_b   coefficients, ms; 0: learn them
chunk_samples  how many steps are remembered
"""

import numpy as np

from afl.sched.policies.registry import register
from afl.sched.timing import Quad, clamp, fit, solve

LEAST = 8


def observe(value, s, event, params):
    """((features, ms), ...) of the last steps."""
    if type(event).__name__ != "Timed":
        return value
    return (*(value or ()), (event.features, event.ms))[-int(params["chunk_samples"]):]


def quad_of(s, params):
    """The model in force, None while nothing is known."""
    if params["chunk_b"] > 0 or params["chunk_a"] > 0:
        return Quad(params["chunk_a"], params["chunk_b"])
    samples = s.learned.get("profiling") or ()
    return fit(samples) if len(samples) >= LEAST else None


def chunk(s, start, left, granted, params):
    """What is left of the step's time, for one prompt after the other; decodes cost nothing."""
    quad = quad_of(s, params)
    if quad is None or not (left > 1).any():
        return left
    whole = params["chunk_ms"] or quad.ms(0, s.config.max_step_tokens)
    ms = whole - sum(quad.ms(at, n) for at, n in granted if n > 1)
    out = left.copy()
    for i in np.flatnonzero(left > 1).tolist():
        n, at = int(left[i]), int(start[i])
        room = solve(quad, at, ms) if ms > 0 else 0.0
        unit = params["chunk_unit"]
        out[i] = clamp(room, n, s.config.max_step_tokens, unit, params["chunk_tail"]) if room >= 1 else 0
        if ms < whole and quad.ms(at, int(out[i])) > ms and out[i] < n:      # not its own step: only what fits
            out[i] = min(n, int(room) // unit * unit)
        ms -= quad.ms(at, int(out[i]))
    return out


def rules(policy, params):
    """Signs and sizes."""
    wrong = [f"{n} is {params[n]}, must not be negative" for n in ("chunk_ms", "chunk_a", "chunk_b") if params[n] < 0]
    if params["chunk_unit"] < 1 or params["chunk_samples"] < LEAST:
        wrong.append(f"chunk_unit must be at least 1 and chunk_samples at least {LEAST}")
    return wrong


register("profiling", observe=observe, chunk=chunk, rules=rules, needs=("timing",), params={
    "chunk_ms": 0.0, "chunk_unit": 64, "chunk_tail": 1.25, "chunk_a": 0.0, "chunk_b": 0.0, "chunk_samples": 64})
