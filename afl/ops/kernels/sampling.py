"""Sampling on the host, row by row in compiled loops, with the sums of the reference in the reference's order."""

import math

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ops.kernels.loops import dense, f32, f64, i32
from afl.ops.sample import GREEDY_BELOW, edit_logits, put_tokens, sample, take_tokens

_exact = njit(cache=True, nogil=True, boundscheck=False)       # sums in order, nothing reassociated


@_exact
def _row(logits, temperature, top_k, top_p, min_p, u, p):
    v = logits.shape[0]
    best = 0
    for i in range(v):
        if logits[i] > logits[best] or (logits[i] != logits[i] and logits[best] == logits[best]):
            best = i
    most = np.float64(logits[best])
    if temperature < GREEDY_BELOW or not np.isfinite(most):
        return best
    t = np.float64(temperature)
    low = np.float64(min_p)
    for i in range(v):
        x = math.exp((np.float64(logits[i]) - most) / t)
        p[i] = x if x >= low else 0.0
    if 0 < top_k < v:
        cut = np.partition(p, v - top_k)[v - top_k]
        for i in range(v):
            if p[i] < cut:
                p[i] = 0.0
    if top_p < 1.0:
        _nucleus(p, np.float64(top_p))
    total = 0.0
    for i in range(v):
        total += p[i]
    goal, mass, last = u * total, 0.0, 0
    for i in range(v):
        mass += p[i]
        if mass > goal:
            return i
        if p[i] > 0.0:
            last = i
    return last


@_exact
def _nucleus(p, top_p):
    """Zero all but the likeliest tokens that reach top_p of the mass.  Only those above a bound are sorted."""
    total = 0.0
    for i in range(p.shape[0]):
        total += p[i]
    bound = 1.0
    while bound > 0.0:
        bound = bound * 0.1 if bound > 1e-12 else 0.0
        mass, n = 0.0, 0
        for i in range(p.shape[0]):
            if p[i] >= bound and p[i] > 0.0:
                mass += p[i]
                n += 1
        if mass > top_p * total * (1.0 + 1e-9):       # the border lies above the bound, whatever the order of the sum
            break
    ids, weights = np.empty(n, np.int64), np.empty(n)
    n = 0
    for i in range(p.shape[0]):
        if p[i] >= bound and p[i] > 0.0:
            ids[n], weights[n] = i, -p[i]
            n += 1
    order = np.argsort(weights, kind="mergesort")
    # the reference compares with the sum in sorted order, whose tail may lie below the bound: add it in that order
    goal = top_p * _sorted_total(p, bound, weights, order)
    kept, mass = 0, 0.0
    while kept < n and (kept == 0 or mass < goal):
        mass -= weights[order[kept]]
        kept += 1
    for i in range(p.shape[0]):
        if p[i] < bound:
            p[i] = 0.0
    for j in range(kept, n):
        p[ids[order[j]]] = 0.0


@_exact
def _sorted_total(p, bound, weights, order):
    total = 0.0
    for j in order:
        total -= weights[j]
    tail = 0.0
    for i in range(p.shape[0]):
        if p[i] < bound:
            tail += p[i]
    return total + tail


@_exact
def _rows(r, v, pl, pt, pk, pp, pm, pu, po):
    logits, out = carray(f32(pl), (r, v)), carray(i32(po), (r,))
    temperature, top_k = carray(f32(pt), (r,)), carray(i32(pk), (r,))
    top_p, min_p, u = carray(f32(pp), (r,)), carray(f32(pm), (r,)), carray(f64(pu), (r,))
    p = np.empty(v)
    for i in range(r):
        out[i] = _row(logits[i], temperature[i], top_k[i], top_p[i], min_p[i], u[i], p)


@_exact
def _take(t, pt, n, pl, po):
    token, last, out = carray(i32(pt), (t,)), carray(i32(pl), (n,)), carray(i32(po), (t,))
    for i in range(t):
        out[i] = token[i] if token[i] >= 0 else last[-1 - token[i]]


@_exact
def _put(r, pr, pt, n, pl):
    row, token, last = carray(i32(pr), (r,)), carray(i32(pt), (r,)), carray(i32(pl), (n,))
    for i in range(r):
        if row[i] >= 0:
            last[row[i]] = token[i]


@kernel(sample, needs={F.NUMBA}, name="numba")
def _sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    r, v = logits.shape
    out = torch.empty(r, dtype=torch.int32)
    logits = logits.contiguous()
    _rows(r, v, logits.data_ptr(), dense(temperature), dense(top_k), dense(top_p), dense(min_p), dense(u), out.data_ptr())
    return out


@kernel(edit_logits, needs={F.TORCH_CPU}, name="scatter")
def _edit_logits(logits: Tensor, row: Tensor, token: Tensor, bias: Tensor, repeat: Tensor, minus: Tensor) -> Tensor:
    """Copies the logits only if there is something to edit."""
    return edit_logits.reference(logits, row, token, bias, repeat, minus) if len(row) else logits


@kernel(take_tokens, needs={F.NUMBA}, name="numba")
def _take_tokens(token: Tensor, last: Tensor) -> Tensor:
    out = torch.empty_like(token)
    _take(len(token), dense(token), len(last), dense(last), out.data_ptr())
    return out


@kernel(put_tokens, needs={F.NUMBA}, name="numba", inplace={0: "last"})
def _put_tokens(last: Tensor, row: Tensor, token: Tensor) -> Tensor:
    _put(len(row), dense(row), dense(token), len(last), dense(last))
    return last
