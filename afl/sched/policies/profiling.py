"""Chunks of equal time: the longer the history, the fewer tokens, so that pipeline stages stay level.

A step may spend `chunk_ms` on prompts.  The time of a chunk follows a x^2 + (2 a L + b) x behind L computed tokens
(`afl/sched/timing.py`); a and b are given, or learned from `Timed` events by non-negative least squares.

Steps of equal time say nothing about what part of it a step costs anyway.  So the first `chunk_profile` prompts' steps
are a profile, their chunks large and small in turn; and what is learned is kept apart by the size of the chunk and of
the history, each of these strata remembering about `chunk_memory` steps, so that the many steps of equal time that
follow do not push the profile out.  A stratum that is seen no more loses weight, down to that of FAINT steps.

chunk_ms       0: the time of max_step_tokens tokens without history
chunk_unit     chunks are multiples of this, as long as they are not the last
chunk_tail     the rest of a prompt goes along if it is at most this many times the chunk
chunk_a, chunk_b   coefficients, ms; 0: learn them
chunk_profile  steps of the profile
chunk_memory   steps that a stratum remembers
"""

from math import exp, log2

import numpy as np

from afl.sched.policies.registry import register
from afl.sched.timing import Moments, Quad, clamp, solve

SHARES = (1 / 16, 1.0, 1 / 4)      # of max_step_tokens: chunks of the profile
FAINT, LIFE = 4.0, 16              # weight that stays; steps, times chunk_memory, after which 1/e of the weight is left


def observe(value, s, event, params):
    """(((log2 tokens, log2 history), (last step, Moments)), ...) in order, of all steps with prompts."""
    if type(event).__name__ != "Timed" or event.features[1] < 1:
        return value
    squares, tokens, _ = event.features
    history = max(0.0, (squares / tokens - tokens) / 2)
    stratum = int(log2(tokens)), int(log2(history / 1024 + 1))
    strata = dict(value or ())
    seen, before = strata.get(stratum, (event.step, Moments()))
    before = aged(before, event.step - seen, params)
    strata[stratum] = event.step, before.add(event.features, event.ms, params["chunk_memory"])
    return tuple(sorted(strata.items()))


def quad_of(s, params):
    """The model in force; None, and the number of the step of the profile, while it is being learned."""
    if params["chunk_b"] > 0 or params["chunk_a"] > 0:
        return Quad(params["chunk_a"], params["chunk_b"]), 0
    strata = s.learned.get("profiling") or ()
    known = sum(m.weight for _, (_, m) in strata)
    return (known_quad(strata, params), 0) if known >= params["chunk_profile"] else (None, int(known))


def aged(moments, steps, params):
    """What is left of a stratum that was not seen for so many steps."""
    return moments.faded(max(FAINT, moments.weight * exp(-steps / (LIFE * params["chunk_memory"]))))


def known_quad(strata, params):
    """The fit over all strata."""
    now, total = max(step for _, (step, _) in strata), Moments()
    for _, (step, moments) in strata:
        total += aged(moments, now - step, params)
    return total.quad()


def chunk(s, start, left, granted, params):
    """What is left of the step's time, for one prompt after the other; decodes cost nothing."""
    if not (left > 1).any():
        return left
    quad, turn = quad_of(s, params)
    if quad is None:
        most = s.config.max_step_tokens * SHARES[turn % len(SHARES)]
        return np.where(left > 1, np.minimum(left, max(1, int(most))), left).astype(left.dtype)
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
    wrong += [f"{n} is {params[n]}, must be at least {least}"
              for n, least in (("chunk_unit", 1), ("chunk_profile", 3), ("chunk_memory", params["chunk_profile"]))
              if params[n] < least]
    return wrong


register("profiling", observe=observe, chunk=chunk, rules=rules, needs=("timing",), params={
    "chunk_ms": 0.0, "chunk_unit": 64, "chunk_tail": 1.25, "chunk_a": 0.0, "chunk_b": 0.0, "chunk_profile": 32,
    "chunk_memory": 64.0})
