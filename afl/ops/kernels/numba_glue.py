"""What lies between a decoder's matrix products, in one pass each: norms, rotation, cache writes, gates.  float32."""

import math

import numpy as np
import torch
from numba import carray
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import FLOAT32
from afl.ops.act import swiglu
from afl.ops.attention import write_kv
from afl.ops.embed import last_rows
from afl.ops.fused import qkv_rope_write
from afl.ops.kernels.loops import dense, f32, i32, loops, rows_of
from afl.ops.norm import add_rms_norm, rms_norm
from afl.ops.rope import rope


@loops
def _norm(n, d, px, stride, pg, eps, py):
    g, y = carray(f32(pg), (d,)), carray(f32(py), (n, d))
    x = carray(f32(px), (n * stride + d,))
    for i in range(n):
        total = np.float32(0)
        at = i * stride
        for j in range(d):
            total += x[at + j] * x[at + j]
        r = np.float32(1) / np.sqrt(total / np.float32(d) + np.float32(eps))
        for j in range(d):
            y[i, j] = x[at + j] * r * g[j]


@loops
def _add_norm(n, d, px, pr, pg, eps, py, ps):
    x, residual, g = carray(f32(px), (n, d)), carray(f32(pr), (n, d)), carray(f32(pg), (d,))
    y, s = carray(f32(py), (n, d)), carray(f32(ps), (n, d))
    for i in range(n):
        total = np.float32(0)
        for j in range(d):
            a = x[i, j] + residual[i, j]
            s[i, j] = a
            total += a * a
        r = np.float32(1) / np.sqrt(total / np.float32(d) + np.float32(eps))
        for j in range(d):
            y[i, j] = s[i, j] * r * g[j]


@loops
def _rotate(x, cos, sin, y):
    """One head, halves layout: x, y [e]; cos, sin [p]."""
    p = cos.shape[0]
    for j in range(p):
        u, w = x[j], x[j + p]
        y[j] = u * cos[j] - w * sin[j]
        y[j + p] = u * sin[j] + w * cos[j]
    for j in range(2 * p, x.shape[0]):
        y[j] = x[j]


@loops
def _rope(t, h, e, p, px, stride, pc, ps, py):
    cos, sin, y = carray(f32(pc), (t, p)), carray(f32(ps), (t, p)), carray(f32(py), (t, h, e))
    x = carray(f32(px), (t * stride + h * e,))
    for i in range(t):
        for a in range(h):
            at = i * stride + a * e
            _rotate(x[at : at + e], cos[i], sin[i], y[i, a])


@loops
def _write(t, n, pk, k_stride, pv, v_stride, slots, ps, pkc, pvc):
    """n = kv heads * channels per token; `slots` in all."""
    slot = carray(i32(ps), (t,))
    k, v = carray(f32(pk), (t * k_stride + n,)), carray(f32(pv), (t * v_stride + n,))
    k_cache, v_cache = carray(f32(pkc), (slots, n)), carray(f32(pvc), (slots, n))
    for i in range(t):
        at = slot[i]
        if at >= 0:
            for j in range(n):
                k_cache[at, j] = k[i * k_stride + j]
            for j in range(n):
                v_cache[at, j] = v[i * v_stride + j]


@loops
def _qkv(t, h, k, e, p, px, stride, pc, ps, slots, pslot, pkc, pvc, pq):
    cos, sin, q = carray(f32(pc), (t, p)), carray(f32(ps), (t, p)), carray(f32(pq), (t, h, e))
    x, slot = carray(f32(px), (t * stride + (h + 2 * k) * e,)), carray(i32(pslot), (t,))
    k_cache, v_cache = carray(f32(pkc), (slots, k, e)), carray(f32(pvc), (slots, k, e))
    for i in range(t):
        for a in range(h):
            at = i * stride + a * e
            _rotate(x[at : at + e], cos[i], sin[i], q[i, a])
        to = slot[i]
        if to >= 0:
            for a in range(k):
                at = i * stride + (h + a) * e
                _rotate(x[at : at + e], cos[i], sin[i], k_cache[to, a])
                at += k * e
                row = v_cache[to, a]
                for j in range(e):
                    row[j] = x[at + j]


@loops
def _gate(n, f, px, stride, py):
    y, x = carray(f32(py), (n, f)), carray(f32(px), (n * stride + 2 * f,))
    for i in range(n):
        at = i * stride
        for j in range(f):
            g = x[at + j]
            y[i, j] = g / (np.float32(1) + np.float32(math.exp(-g))) * x[at + f + j]


def _even_rows(x: Tensor) -> Tensor:
    """x as [n, d] with one stride between rows; heads cut out of a wider projection are copied first."""
    return x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])


@kernel(rms_norm, needs={F.NUMBA}, dtypes=FLOAT32, name="numba")
def _rms_norm(x: Tensor, gamma: Tensor, *, eps: float) -> Tensor:
    rows = _even_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    _norm(rows.shape[0], rows.shape[1], *rows_of(rows), dense(gamma), eps, y.data_ptr())
    return y


@kernel(add_rms_norm, needs={F.NUMBA}, dtypes=FLOAT32, name="numba")
def _add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    y, s = torch.empty_like(x), torch.empty_like(x)
    d = x.shape[-1]
    n = x.numel() // max(d, 1)
    _add_norm(n, d, x.data_ptr(), residual.data_ptr(), dense(gamma), eps, y.data_ptr(), s.data_ptr())
    return y, s


@kernel(rope, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", when=lambda x, cos, sin, *, interleaved: not interleaved)
def _rope_halves(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    t, h, e = x.shape
    _rope(t, h, e, cos.shape[1], *rows_of(x), dense(cos), dense(sin), y.data_ptr())
    return y


@kernel(write_kv, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", priority=1, inplace={0: "k_cache", 1: "v_cache"})
def _write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    b, s, h, e = k_cache.shape
    _write(k.shape[0], h * e, *rows_of(k), *rows_of(v), b * s, dense(slot), dense(k_cache), dense(v_cache))
    return k_cache, v_cache


@kernel(qkv_rope_write, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", inplace={1: "k_cache", 2: "v_cache"},
        when=lambda *types, h, e, interleaved: not interleaved)
def _qkv_rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot: Tensor, *,
    h: int, e: int, interleaved: bool,
) -> tuple[Tensor, ...]:
    t, k = qkv.shape[0], k_cache.shape[2]
    q = torch.empty((t, h, e), dtype=qkv.dtype)
    _qkv(t, h, k, e, cos.shape[1], *rows_of(qkv), dense(cos), dense(sin), k_cache.shape[0] * k_cache.shape[1],
         dense(slot), dense(k_cache), dense(v_cache), q.data_ptr())
    return q, k_cache, v_cache


@kernel(swiglu, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", priority=1)
def _swiglu(x: Tensor) -> Tensor:
    f = x.shape[-1] // 2
    rows = _even_rows(x)
    y = torch.empty((*x.shape[:-1], f), dtype=x.dtype)
    _gate(rows.shape[0], f, *rows_of(rows), y.data_ptr())
    return y


@kernel(last_rows, needs={F.TORCH_CPU}, name="index")
def _last_rows(x: Tensor, q_start: Tensor) -> Tensor:
    q = q_start.numpy()
    empty = q[1:] == q[:-1]
    y = x.index_select(0, torch.from_numpy(np.maximum(q[1:] - 1, 0))) if len(x) else x.new_zeros(len(q) - 1, x.shape[1])
    if empty.any():
        y[torch.from_numpy(empty)] = 0
    return y
