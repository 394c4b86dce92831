"""Sampling on the host, row by row in compiled loops.

Whatever the filters, the kept tokens of a row are a top set: those above a border logit, and those equal to it up to
some id.  So a filter only moves the border, and blocks whose maximum lies below it are never looked at.  Masses are
added block by block in id order.  Nothing is reassociated and `exp` is our own, so a seed gives the same bits on every
processor.
"""

import math

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.machine_code import kept
from afl.ops.kernels.loops import dense, f32, f64, i32
from afl.ops.sample import GREEDY_BELOW, SLACK, edit_logits, greedy, put_tokens, sample, take_tokens

_exact = kept(njit, nogil=True, boundscheck=False)

BLOCK = 64                     # tokens that are skipped or weighed together
BINS = 2048                    # of weights from 1 down to 2**-64, 32 per octave
_LOWEST = -700.0               # exp of less is zero: no sum of weights, the largest of which is 1, could tell
_NOTHING = np.float32(-np.inf)
_GREEDY_BELOW = np.float32(GREEDY_BELOW)


@_exact
def _exp(x):
    """exp(x) for -708 < x <= 0, within 2 units of the last place, in operations that vectorise."""
    shifted = x * 1.4426950408889634 + 6755399441055744.0          # 1.5 * 2**52: the low bits now hold round(x / ln 2)
    k = shifted - 6755399441055744.0
    r = (x - k * 0.6931471803691238) - k * 1.9082149292705877e-10   # |r| <= ln 2 / 2
    s = r * r
    q = s * s
    # Taylor coefficients 1/n!, n = 0 ... 13
    a = (1.0 + r) + (0.5 + r * 0.16666666666666666) * s
    b = (0.041666666666666664 + r * 0.008333333333333333) + (0.001388888888888889 + r * 1.984126984126984e-4) * s
    c = (2.48015873015873e-05 + r * 2.7557319223985893e-06) + (2.755731922398589e-07 + r * 2.505210838544172e-08) * s
    y = a + q * (b + q * (c + q * (2.08767569878681e-09 + r * 1.6059043836821613e-10)))
    return np.int64(np.float64(y).view(np.int64) + (np.float64(shifted).view(np.int64) << 52)).view(np.float64)


@_exact
def _tops(x, tops):
    """The largest logit of each block; NaN is passed over."""
    v = x.shape[0]
    for b in range(tops.shape[0]):
        lo = b * BLOCK
        m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = _NOTHING
        if lo + BLOCK <= v:
            for j in range(lo, lo + BLOCK, 8):
                m0, m1, m2, m3 = max(m0, x[j]), max(m1, x[j + 1]), max(m2, x[j + 2]), max(m3, x[j + 3])
                m4, m5, m6, m7 = max(m4, x[j + 4]), max(m5, x[j + 5]), max(m6, x[j + 6]), max(m7, x[j + 7])
        else:
            for j in range(lo, v):
                m0 = max(m0, x[j])
        tops[b] = max(max(max(m0, m1), max(m2, m3)), max(max(m4, m5), max(m6, m7)))


@_exact
def _first(x, tops, value):
    """The lowest id whose logit is `value`; 0 if that is -inf, where NaN counts as equal."""
    for b in range(tops.shape[0]):
        if tops[b] == value and value > _NOTHING:
            for j in range(b * BLOCK, min(b * BLOCK + BLOCK, x.shape[0])):
                if x[j] == value:
                    return j
    return 0


@_exact
def _kth(x, k, tops):
    """The k-th largest logit; -inf if fewer than k are numbers."""
    v, blocks = x.shape[0], tops.shape[0]
    bound, found, n = _NOTHING, np.empty(v, np.float32), 0
    if k <= blocks:            # k blocks hold a logit that large, so the k-th largest is at least that
        for b in range(blocks):
            found[b] = tops[b]
        bound = _select(found, blocks, k)
    for b in range(blocks):
        if tops[b] >= bound:
            for j in range(b * BLOCK, min(b * BLOCK + BLOCK, v)):
                if x[j] >= bound:
                    found[n] = x[j]
                    n += 1
    return _select(found, n, k) if n >= k else _NOTHING


@_exact
def _select(a, n, k):
    """The k-th largest of a[:n], which holds no NaN and is overwritten.  (np.partition takes seconds to compile.)"""
    while True:
        pivot, above, equal = a[n // 2], 0, 0
        for i in range(n):
            above += a[i] > pivot
            equal += a[i] == pivot
        if above < k <= above + equal:
            return pivot
        larger, m = k <= above, 0
        for i in range(n):
            if a[i] > pivot if larger else a[i] < pivot:
                a[m] = a[i]
                m += 1
        k -= 0 if larger else above + equal
        n = m


@_exact
def _weigh(x, most, scale, border, tops, p, sums):
    """Weights p of the tokens at or above the border, their sum by block, and the sum of all."""
    blocks, total = tops.shape[0], 0.0
    end = 0
    while end < blocks:
        start = end
        while end < blocks and not tops[end] < border:     # a run of blocks is one long loop
            end += 1
        _weigh_run(x[start * BLOCK : end * BLOCK], most, scale, border, p[start * BLOCK : end * BLOCK])
        for b in range(start, end):
            sums[b] = _sum(p[b * BLOCK : (b + 1) * BLOCK])
            total += sums[b]
        if end < blocks:
            sums[end] = 0.0
        end += 1
    return total


@_exact
def _weigh_run(x, most, scale, border, p):
    for j in range(x.shape[0]):
        z = (np.float64(x[j]) - most) * scale
        y = _exp(z)
        y = y if z > _LOWEST else 0.0
        p[j] = y if x[j] >= border else 0.0


@_exact
def _sum(p):
    n = p.shape[0] // 8 * 8
    a = b = c = d = e = f = g = h = 0.0
    for j in range(0, n, 8):
        a, b, c, d = a + p[j], b + p[j + 1], c + p[j + 2], d + p[j + 3]
        e, f, g, h = e + p[j + 4], f + p[j + 5], g + p[j + 6], h + p[j + 7]
    for j in range(n, p.shape[0]):
        a += p[j]
    return ((a + e) + (c + g)) + ((b + f) + (d + h))


@_exact
def _bin(p):
    """Which of BINS a weight lies in; 0 holds the largest."""
    return min((np.float64(1.0).view(np.int64) - np.float64(p).view(np.int64)) >> 47, BINS - 1)


@_exact
def _nucleus(x, p, sums, total, tail):
    """Border logit and highest id kept among those equal to it, once the least likely tokens up to mass `tail` go.

    Tokens that cannot hold `tail` even all together go first, then whole bins of weights; only the bin in which the
    border lies is searched.
    """
    v = x.shape[0]
    floor, binned, held = tail / v, 0.0, np.zeros(BINS)
    for b in range(sums.shape[0]):
        if sums[b] >= floor:
            for j in range(b * BLOCK, min(b * BLOCK + BLOCK, v)):
                if p[j] >= floor:
                    held[_bin(p[j])] += p[j]
    for at in range(BINS):
        binned += held[at]
    gone = total - binned
    for at in range(BINS - 1, -1, -1):
        if held[at] == 0.0 or gone + held[at] <= tail:
            gone += held[at]
            continue
        ids, n = np.empty(v, np.int64), 0
        for b in range(sums.shape[0] - 1, -1, -1):         # among equals the higher id goes first
            if sums[b] >= floor:
                for j in range(min(b * BLOCK + BLOCK, v) - 1, b * BLOCK - 1, -1):
                    if p[j] >= floor and _bin(p[j]) == at:
                        ids[n] = j
                        n += 1
        border, last, gone = _border(x, p, ids, n, gone, tail)
        if last >= 0:
            return border, last
    return 0.0, -1


@_exact
def _border(x, p, ids, n, gone, tail):
    """Of ids[:n], falling: the logit and id at which `gone` passes `tail`, or -1 if it does not; and `gone` by then."""
    while n:
        pivot, less, equal = x[ids[n // 2]], 0.0, 0.0
        for i in range(n):
            a, w = x[ids[i]], p[ids[i]]
            less += w if a < pivot else 0.0
            equal += w if a == pivot else 0.0
        lower = gone + less > tail
        if not lower:
            gone += less
            if gone + equal > tail:
                for i in range(n):
                    if x[ids[i]] == pivot:
                        last = ids[i]
                        gone += p[last]
                        if gone > tail:
                            break
                return np.float64(pivot), last, gone
            gone += equal
        m = 0
        for i in range(n):
            if x[ids[i]] < pivot if lower else x[ids[i]] > pivot:
                ids[m] = ids[i]
                m += 1
        n = m
    return 0.0, -1, gone


@_exact
def _drop(x, border, last, p, sums):
    """Take the weight of tokens beyond the border; the sum of what is left."""
    total = 0.0
    _drop_run(x, border, last, p)
    for b in range(sums.shape[0]):
        if sums[b] > 0.0:
            sums[b] = _sum(p[b * BLOCK : (b + 1) * BLOCK])
            total += sums[b]
    return total


@_exact
def _drop_run(x, border, last, p):
    for j in range(x.shape[0]):
        a, y = x[j], p[j]
        p[j] = y if (a > border) | ((a == border) & (j <= last)) else 0.0


@_exact
def _draw(p, sums, goal):
    """The first id at which the running sum passes `goal`, or the last one that has weight."""
    run, last = 0.0, 0
    for b in range(sums.shape[0]):
        if sums[b] == 0.0:
            continue
        lo, hi = b * BLOCK, min(b * BLOCK + BLOCK, p.shape[0])
        within = run
        run += sums[b]
        if run > goal or b == sums.shape[0] - 1:
            for j in range(lo, hi):
                within += p[j]
                if within > goal:
                    return j
        for j in range(hi - 1, lo - 1, -1):
            if p[j] > 0.0:
                last = j
                break
    return last


@_exact
def _row(x, temperature, top_k, top_p, min_p, u, tops, p, sums):
    v = x.shape[0]
    _tops(x, tops)
    most = -math.inf
    for b in range(tops.shape[0]):
        most = max(most, np.float64(tops[b]))
    if not temperature >= _GREEDY_BELOW or math.isinf(most):
        return _first(x, tops, most)
    t = np.float64(temperature)
    border = -math.inf
    if min_p > 0.0:
        border = most + math.log(min(np.float64(min_p), 1.0) * (1.0 - SLACK)) * t
    if 0 < top_k < v:
        border = max(border, np.float64(_kth(x, top_k, tops)))
    total = _weigh(x, most, 1.0 / t, border, tops, p, sums)
    if top_p < 1.0:
        border, last = _nucleus(x, p, sums, total, (1.0 - np.float64(top_p)) * (1.0 + SLACK) * total)
        if last < 0:
            return _first(x, tops, most)
        total = _drop(x, border, last, p, sums)
    return _draw(p, sums, u * total)


@_exact
def _rows(r, v, pl, pt, pk, pp, pm, pu, po):
    logits, out = carray(f32(pl), (r, v)), carray(i32(po), (r,))
    temperature, top_k = carray(f32(pt), (r,)), carray(i32(pk), (r,))
    top_p, min_p, u = carray(f32(pp), (r,)), carray(f32(pm), (r,)), carray(f64(pu), (r,))
    blocks = (v + BLOCK - 1) // BLOCK
    p, tops, sums = np.empty(v), np.empty(blocks, np.float32), np.empty(blocks)
    for i in range(r):
        out[i] = _row(logits[i], temperature[i], top_k[i], top_p[i], min_p[i], u[i], tops, p, sums)


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


@kernel(greedy, needs={F.TORCH_CPU}, name="numpy")
def _greedy(logits: Tensor) -> Tensor:
    """numpy's argmax is vector code (torch's is not) and finds NaN first; such rows are searched again."""
    x = logits.numpy()
    at = x.argmax(1)
    bad = np.flatnonzero(np.isnan(x[np.arange(len(x)), at]))
    if bad.size:
        at[bad] = np.where(np.isnan(x[bad]), -np.inf, x[bad]).argmax(1)
    return torch.from_numpy(at.astype(np.int32))


@kernel(sample, needs={F.NUMBA}, name="numba")
def _sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    r, v = logits.shape
    out = torch.empty(r, dtype=torch.int32)
    logits = logits.contiguous()
    t, k, p, m = dense(temperature), dense(top_k), dense(top_p), dense(min_p)
    _rows(r, v, logits.data_ptr(), t, k, p, m, dense(u), out.data_ptr())
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
