"""Paged attention of float32 on the host: rows of one token in one compiled loop that reads blocks in place."""

import math

import numpy as np
import torch
from numba import carray
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import FLOAT32
from afl.ops.attention import paged_attention
from afl.ops.kernels.loops import dense, f32, i32, loops, rows_of
from afl.ops.kernels.torch_cpu import attend_row
from afl.types import HostInts


@loops
def _decode(r, t, b, s, k, e, group, w, pq, stride, pkc, pvc, pb, starts, lens, scale, scores, py):
    """Each token of the cache is read once for all heads: k and v of a token lie together, block by block."""
    h = k * group
    q, out = carray(f32(pq), (t * stride + h * e,)), carray(f32(py), (t, h, e))
    k_cache, v_cache = carray(f32(pkc), (b, s, k, e)), carray(f32(pvc), (b, s, k, e))
    blocks = carray(i32(pb), (r, w))
    for i in range(r):
        if starts[i + 1] - starts[i] != 1:
            continue
        n, at = lens[i], starts[i] * stride
        for c in range((n + s - 1) // s):
            block, first = k_cache[blocks[i, c]], c * s
            for o in range(min(s, n - first)):
                for a in range(k):
                    key = block[o, a]
                    for g in range(group):
                        head = a * group + g
                        query = q[at + head * e : at + head * e + e]
                        total = np.float32(0)
                        for j in range(e):
                            total += query[j] * key[j]
                        scores[head, first + o] = total * scale
        for head in range(h):
            row = scores[head]
            most = row[0]
            for p in range(1, n):
                most = max(most, row[p])
            total = np.float32(0)
            for p in range(n):
                x = np.float32(math.exp(row[p] - most))
                row[p] = x
                total += x
            inverse = np.float32(1) / total
            for p in range(n):
                row[p] *= inverse
            y = out[starts[i], head]
            for j in range(e):
                y[j] = np.float32(0)
        for c in range((n + s - 1) // s):
            block, first = v_cache[blocks[i, c]], c * s
            for o in range(min(s, n - first)):
                for a in range(k):
                    value = block[o, a]
                    for g in range(group):
                        x = scores[a * group + g, first + o]
                        y = out[starts[i], a * group + g]
                        for j in range(e):
                            y[j] += x * value[j]


@kernel(paged_attention, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", priority=1)
def _paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, q_start: Tensor, kv_len: Tensor,
    q_start_h: HostInts, kv_len_h: HostInts, *, scale: float,
) -> Tensor:
    """Rows of one token in the loop; longer rows through torch's attention, one by one."""
    starts, lens = q_start_h.array, kv_len_h.array
    t, h, e = q.shape
    b, s, k, _ = k_cache.shape
    r = len(lens)
    out = torch.empty((t, h, e), dtype=q.dtype)
    counts = starts[1:] - starts[:-1]
    single = counts == 1
    if single.any():
        scores = np.empty((h, int(lens[single].max())), np.float32)
        _decode(r, t, b, s, k, e, h // k, blocks.shape[1], *rows_of(q), dense(k_cache), dense(v_cache), dense(blocks),
                starts, lens, np.float32(scale), scores, out.data_ptr())
    if t != r or not single.all():
        for i in np.flatnonzero(counts > 1).tolist():
            attend_row(q, k_cache, v_cache, blocks[i], int(starts[i]), int(starts[i + 1]), int(lens[i]), scale, out)
        if starts[-1] < t:
            out[int(starts[-1]) :] = 0
    return out
