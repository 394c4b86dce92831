"""Paged attention of float32 on the host, decode and prefill alike: blocks are read where they lie, KEYS at a time.

A query head's result comes from one chain of operations over the keys in order (online softmax: Milakov and Gimelshein
2018, arXiv 1805.02867, algorithm 3), tiles of keys starting at multiples of KEYS.  So its bits are the same in
every batch, in every chunk of a prompt and on any number of threads, and the temporary memory does not grow with the
length.  The heads that share a kv head, and up to about QUERIES of them from neighbouring tokens, share the tiles.
"""

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import FLOAT32
from afl.ops.attention import paged_attention
from afl.ops.kernels import vectors as v
from afl.ops.kernels.loops import dense, f32, f64, i32, loops, rows_of
from afl.ops.kernels.region import entry, fork, gomp, take
from afl.ops.kernels.vectors import KEYS, ROWS, WIDTH
from afl.types import HostInts

QUERIES = 192                      # query rows of one piece of work, about
SMALL = 1 << 17                    # multiply-adds below which waking the other threads costs more than it saves
WORDS = 24


@njit
def _scores(m, q, keys, scores, e):
    """scores [m, KEYS] = q [m, e] times keys [e, KEYS], addresses."""
    qs, wide = e * 4, KEYS * 4
    i = 0
    while i + ROWS <= m:
        v.all_rows(q + i * qs, qs, keys, wide, scores + i * wide, wide, e, 0)  # type: ignore[call-arg]
        i += ROWS
    if i + 4 <= m:
        v.four_rows(q + i * qs, qs, keys, wide, scores + i * wide, wide, e, 0)  # type: ignore[call-arg]
        i += 4
    if i + 3 == m:
        v.three_rows(q + i * qs, qs, keys, wide, scores + i * wide, wide, e, 0)  # type: ignore[call-arg]
    elif i + 2 == m:
        v.two_rows(q + i * qs, qs, keys, wide, scores + i * wide, wide, e, 0)  # type: ignore[call-arg]
    elif i + 1 == m:
        v.one_row(q + i * qs, qs, keys, wide, scores + i * wide, wide, e, 0)  # type: ignore[call-arg]


@njit
def _values(m, p, n, values, vs, y, ys, shrink):
    """y [m, KEYS channels] = y * shrink + p [m, n of KEYS] times values [n, ...], rows vs and ys bytes apart."""
    wide = KEYS * 4
    i = 0
    while i + ROWS <= m:
        v.grow_all(p + i * wide, wide, values, vs, y + i * ys, ys, n, shrink + i * 4)  # type: ignore[call-arg]
        i += ROWS
    if i + 4 <= m:
        v.grow_four(p + i * wide, wide, values, vs, y + i * ys, ys, n, shrink + i * 4)  # type: ignore[call-arg]
        i += 4
    if i + 3 == m:
        v.grow_three(p + i * wide, wide, values, vs, y + i * ys, ys, n, shrink + i * 4)  # type: ignore[call-arg]
    elif i + 2 == m:
        v.grow_two(p + i * wide, wide, values, vs, y + i * ys, ys, n, shrink + i * 4)  # type: ignore[call-arg]
    elif i + 1 == m:
        v.grow_one(p + i * wide, wide, values, vs, y + i * ys, ys, n, shrink + i * 4)  # type: ignore[call-arg]


@njit
def _piece(d, scale, row, a, first, count, q_tile, y, most, total, scores, shrink, ones, keys, copy):
    """Attention of `count` tokens from `first` on of one row, the query heads of kv head a.

    q_tile [rows, e] and y [rows, wide]: queries and sums, rows = count * group; copy [2, KEYS, wide]: keys and values
    where those of a tile do not lie in lines of WIDTH whole tokens and KEYS channels.
    """
    t, b, s, k, e, group, w, pq, stride, pkc, pvc, pb, pstart, plen, py = (
        d[3], d[4], d[5], d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13], d[14], d[15], d[16], d[17])
    r = d[18]
    h, wide, rows = k * group, y.shape[1], count * group
    q, out = carray(f32(pq), (t * stride + h * e,)), carray(f32(py), (t, h, e))
    k_cache, v_cache = carray(f32(pkc), (b, s, k, e)), carray(f32(pvc), (b, s, k, e))
    blocks, start, length = carray(i32(pb), (r, w)), carray(i32(pstart), (r + 1,)), carray(i32(plen), (r,))
    begin = start[row]
    behind = length[row] - (start[row + 1] - begin)             # keys before the row's first new token
    for i in range(count):
        at = (begin + first + i) * stride + a * group * e
        for g in range(group):
            for j in range(e):
                q_tile[i * group + g, j] = q[at + g * e + j] * scale
    y[:rows] = np.float32(0)
    most[:rows] = np.float32(-np.inf)
    total[:rows] = np.float32(0)
    n = behind + first + count                                  # keys that the last token sees
    straight = s % WIDTH == 0 and e % KEYS == 0
    jump = k * e * 4
    queries, summed, top, sums = q_tile.ctypes.data, y.ctypes.data, most.ctypes.data, total.ctypes.data
    scored, factors, same = scores.ctypes.data, shrink.ctypes.data, ones.ctypes.data
    turned, copied = keys.ctypes.data, copy.ctypes.data
    for c in range((n + KEYS - 1) // KEYS):
        low = c * KEYS
        seen = min(KEYS, n - low)
        if not straight:
            for o in range(seen):
                block, offset = blocks[row, (low + o) // s], (low + o) % s
                for j in range(e):
                    copy[0, o, j] = k_cache[block, offset, a, j]
                    copy[1, o, j] = v_cache[block, offset, a, j]
        for part in range((seen + WIDTH - 1) // WIDTH):
            at = low + part * WIDTH
            x, xs = copied + part * WIDTH * wide * 4, wide * 4
            if straight:
                x, xs = pkc + ((blocks[row, at // s] * s + at % s) * k + a) * e * 4, jump
            for j in range(0, e, WIDTH):
                v.transpose(x + j * 4, xs, turned + (j * KEYS + part * WIDTH) * 4, KEYS * 4)  # type: ignore[call-arg]
        sooner = max(0, low - behind - first) * group           # rows of tokens that see none of these keys
        live = rows - sooner
        _scores(live, queries + sooner * e * 4, turned, scored + sooner * KEYS * 4, e)
        for i in range(sooner, rows):
            own = min(KEYS, behind + first + i // group + 1 - low)
            v.weigh(scored + i * KEYS * 4, own, top + i * 4, sums + i * WIDTH * 4,  # type: ignore[call-arg]
                    factors + i * 4)
        for part in range((seen + WIDTH - 1) // WIDTH):
            at = low + part * WIDTH
            x, xs = copied + (KEYS + part * WIDTH) * wide * 4, wide * 4
            if straight:
                x, xs = pvc + ((blocks[row, at // s] * s + at % s) * k + a) * e * 4, jump
            factor = factors + sooner * 4 if part == 0 else same
            for j in range(0, wide, KEYS):
                _values(live, scored + (sooner * KEYS + part * WIDTH) * 4, min(WIDTH, seen - part * WIDTH),
                        x + j * 4, xs, summed + (sooner * wide + j) * 4, wide * 4, factor)
    for i in range(count):
        for g in range(group):
            at = i * group + g
            sum_ = np.float32(0)
            for j in range(WIDTH):
                sum_ += total[at, j]
            inverse = np.float32(1) / sum_
            for j in range(e):
                out[begin + first + i, a * group + g, j] = y[at, j] * inverse


def _share(work):
    """The work of one thread: pieces (row, kv head, tokens), longest histories first."""
    d = carray(work, (WORDS,))
    counter, pieces, chunk, k, e, group, r = d[0], d[1], d[2], d[6], d[7], d[8], d[18]
    scale = np.float32(carray(f64(d[19]), (1,))[0])
    listed = carray(i32(d[20]), (pieces, 2))
    wide, rows = (e + KEYS - 1) // KEYS * KEYS, chunk * group
    deep = (e + WIDTH - 1) // WIDTH * WIDTH
    q_tile, y = np.empty((rows, e), np.float32), np.empty((rows, wide), np.float32)
    most, shrink, ones = np.empty(rows, np.float32), np.empty(rows, np.float32), np.ones(rows, np.float32)
    total, scores = np.empty((rows, WIDTH), np.float32), np.empty((rows, KEYS), np.float32)
    keys, copy = np.empty((deep, KEYS), np.float32), np.zeros((2, KEYS, wide), np.float32)
    start = carray(i32(d[15]), (r + 1,))
    while True:
        c = take(counter)  # type: ignore[call-arg]
        if c >= pieces * k:
            break
        row, first = listed[c // k, 0], listed[c // k, 1]
        count = min(chunk, start[row + 1] - start[row] - first)
        _piece(d, scale, row, c % k, first, count, q_tile, y, most, total, scores, shrink, ones, keys, copy)


@loops
def _start(parallel, share, threads, chunk, t, b, s, k, e, group, w, pq, stride, pkc, pvc, pb, starts, lens, py, scale,
           small):
    """List the pieces and let the threads take them; one thread if there is little to do."""
    r = len(lens)
    work, real = np.zeros(WORDS, np.int64), np.empty(1, np.float64)
    pieces, total = 0, 0
    for i in range(r):
        new = starts[i + 1] - starts[i]
        pieces += (new + chunk - 1) // chunk
        total += new * lens[i]
    listed = np.empty((pieces, 2), np.int32)
    at = 0
    for i in range(r):
        for first in range((starts[i + 1] - starts[i] - 1) // chunk * chunk, -1, -chunk):
            listed[at, 0], listed[at, 1] = i, first
            at += 1
    real[0] = scale
    work[0] = work.ctypes.data + (WORDS - 1) * 8
    work[1], work[2], work[3], work[4], work[5], work[6], work[7], work[8] = pieces, chunk, t, b, s, k, e, group
    work[9], work[10], work[11], work[12], work[13], work[14] = w, pq, stride, pkc, pvc, pb
    work[15], work[16], work[17], work[18] = starts.ctypes.data, lens.ctypes.data, py, r
    work[19], work[20] = real.ctypes.data, listed.ctypes.data
    alone = 1 if total * k * group * e < small else threads
    fork(parallel, share, work, alone)  # type: ignore[call-arg]
    return real[0] + listed.size       # both live until here


@kernel(paged_attention, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", priority=1)
def _paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, q_start: Tensor, kv_len: Tensor,
    q_start_h: HostInts, kv_len_h: HostInts, *, scale: float,
) -> Tensor:
    """Bits of a row's result depend on that row alone."""
    starts, lens = q_start_h.array, kv_len_h.array
    t, h, e = q.shape
    b, s, k, _ = k_cache.shape
    out = torch.empty((t, h, e), dtype=q.dtype)
    group = h // k
    most = int((starts[1:] - starts[:-1]).max(initial=1))
    _start(gomp(), entry(_share), torch.get_num_threads(), min(most, max(1, QUERIES // group)), t, b, s, k, e, group,
           blocks.shape[1], *rows_of(q), dense(k_cache), dense(v_cache), dense(blocks), starts, lens, out.data_ptr(),
           scale, SMALL)
    if starts[-1] < t:
        out[int(starts[-1]) :] = 0
    return out
