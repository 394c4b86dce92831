"""Kernels compiled by numba for float32: what torch would do in many small calls, in one pass over the data.

All loops are serial and each row is computed on its own, so a row's bits do not depend on its batch mates.  The
additions of a reduction may be reassociated (that is what makes them vector code), in an order fixed by its length.
"""

import math

import numba
import numpy as np
import torch
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import FLOAT32
from afl.ops.attention import paged_attention, write_kv
from afl.ops.embed import last_rows
from afl.ops.kernels.torch_cpu import attend_row
from afl.ops.norm import add_rms_norm, rms_norm
from afl.ops.rope import rope
from afl.types import HostInts

_loops = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, boundscheck=False)


@_loops
def _norm_loop(x, gamma, eps, y):
    d = x.shape[1]
    for i in range(x.shape[0]):
        total = np.float32(0)
        for j in range(d):
            total += x[i, j] * x[i, j]
        r = np.float32(1) / np.sqrt(total / np.float32(d) + eps)
        for j in range(d):
            y[i, j] = x[i, j] * r * gamma[j]


@_loops
def _add_norm_loop(x, residual, gamma, eps, y, s):
    d = x.shape[1]
    for i in range(x.shape[0]):
        total = np.float32(0)
        for j in range(d):
            a = x[i, j] + residual[i, j]
            s[i, j] = a
            total += a * a
        r = np.float32(1) / np.sqrt(total / np.float32(d) + eps)
        for j in range(d):
            y[i, j] = s[i, j] * r * gamma[j]


@_loops
def _rope_loop(x, cos, sin, y):
    p = cos.shape[1]
    for i in range(x.shape[0]):
        for h in range(x.shape[1]):
            for j in range(p):
                u, w = x[i, h, j], x[i, h, j + p]
                y[i, h, j] = u * cos[i, j] - w * sin[i, j]
                y[i, h, j + p] = u * sin[i, j] + w * cos[i, j]
            for j in range(2 * p, x.shape[2]):
                y[i, h, j] = x[i, h, j]


@_loops
def _write_loop(k_cache, v_cache, k, v, slot):
    s = k_cache.shape[1]
    for i in range(slot.shape[0]):
        if slot[i] >= 0:
            b, o = slot[i] // s, slot[i] % s
            for h in range(k.shape[1]):
                for j in range(k.shape[2]):
                    k_cache[b, o, h, j] = k[i, h, j]
                    v_cache[b, o, h, j] = v[i, h, j]


@_loops
def _decode_loop(q, k_cache, v_cache, blocks, rows, starts, lens, scale, scores, out):
    """Attention of one token for each of `rows`.  Blocks are read in place, each once per kv head."""
    s, heads, e = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    group = q.shape[1] // heads
    for i in rows:
        t, n = starts[i], lens[i]
        for h in range(heads):
            for p in range(n):
                b, o = blocks[i, p // s], p % s
                for g in range(group):
                    total = np.float32(0)
                    for j in range(e):
                        total += q[t, h * group + g, j] * k_cache[b, o, h, j]
                    scores[g, p] = total * scale
            for g in range(group):
                most = scores[g, 0]
                for p in range(1, n):
                    most = max(most, scores[g, p])
                total = np.float32(0)
                for p in range(n):
                    w = math.exp(scores[g, p] - most)
                    scores[g, p] = w
                    total += w
                for p in range(n):
                    scores[g, p] /= total
                for j in range(e):
                    out[t, h * group + g, j] = np.float32(0)
            for p in range(n):
                b, o = blocks[i, p // s], p % s
                for g in range(group):
                    w = scores[g, p]
                    for j in range(e):
                        out[t, h * group + g, j] += w * v_cache[b, o, h, j]


@kernel(rms_norm, needs={F.NUMBA}, dtypes=FLOAT32, name="numba")
def _rms_norm(x: Tensor, gamma: Tensor, *, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    d = x.shape[-1]
    # heads that are a slice of a wider projection lie apart: they are gathered first
    _norm_loop(x.reshape(-1, d).numpy(), gamma.numpy(), np.float32(eps), y.view(-1, d).numpy())
    return y


@kernel(add_rms_norm, needs={F.NUMBA}, dtypes=FLOAT32, name="numba")
def _add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    y, s = torch.empty_like(x), torch.empty_like(x)
    d = x.shape[-1]
    two = (x, residual, y, s) if x.ndim == 2 else tuple(a.view(-1, d) for a in (x, residual, y, s))
    a, b, c, e = (z.numpy() for z in two)
    _add_norm_loop(a, b, gamma.numpy(), np.float32(eps), c, e)
    return y, s


@kernel(rope, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", when=lambda x, cos, sin, *, interleaved: not interleaved)
def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    _rope_loop(x.numpy(), cos.numpy(), sin.numpy(), y.numpy())
    return y


@kernel(write_kv, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", priority=1, inplace={0: "k_cache", 1: "v_cache"})
def _write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    _write_loop(k_cache.numpy(), v_cache.numpy(), k.numpy(), v.numpy(), slot.numpy())
    return k_cache, v_cache


@kernel(last_rows, needs={F.NUMBA}, name="torch")
def _last_rows(x: Tensor, q_start: Tensor) -> Tensor:
    q = q_start.numpy()
    if len(q) - 1 == x.shape[0] and q[-1] == x.shape[0]:
        ones = q[1:] - q[:-1]
        if ones.min() == 1:
            return x.clone()
    end = torch.from_numpy(np.maximum(q[1:] - 1, 0))
    y = x.index_select(0, end)
    empty = q[1:] == q[:-1]
    if empty.any():
        y[torch.from_numpy(empty)] = 0
    return y


@kernel(paged_attention, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", priority=1)
def _paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, q_start: Tensor, kv_len: Tensor,
    q_start_h: HostInts, kv_len_h: HostInts, *, scale: float,
) -> Tensor:
    """Rows of one token in one compiled loop over the blocks; longer rows through torch's attention."""
    starts, lens = q_start_h.array, kv_len_h.array
    counts = starts[1:] - starts[:-1]
    single = np.flatnonzero(counts == 1)
    out = torch.empty(q.shape, dtype=q.dtype)
    if single.size:
        group = q.shape[1] // k_cache.shape[2]
        scores = np.empty((group, int(lens[single].max())), np.float32)
        _decode_loop(
            q.numpy(), k_cache.numpy(), v_cache.numpy(), blocks.numpy(), single, starts, lens, np.float32(scale),
            scores, out.numpy(),
        )
    for i in np.flatnonzero(counts > 1).tolist():
        attend_row(q, k_cache, v_cache, blocks[i], int(starts[i]), int(starts[i + 1]), int(lens[i]), scale, out)
    if starts[-1] < q.shape[0]:
        out[int(starts[-1]) :] = 0
    return out
