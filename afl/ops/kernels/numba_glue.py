"""What lies between a decoder's matrix products, in one pass each: norms, rotation, cache writes, gates.  float32.

Few rows are done by the calling thread, many by all threads.
"""


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
from afl.ops.kernels.region import rows_of_share, spread
from afl.ops.kernels.vectors import WIDTH, gate
from afl.ops.norm import add_rms_norm, rms_norm
from afl.ops.rope import rope

MANY = 32                          # rows from which on threads share the work


@loops
def _norm(first, last, d, px, stride, pg, eps, py):
    g, y = carray(f32(pg), (d,)), carray(f32(py), (last, d))
    x = carray(f32(px), (last * stride + d,))
    for i in range(first, last):
        total = np.float32(0)
        at = i * stride
        for j in range(d):
            total += x[at + j] * x[at + j]
        r = np.float32(1) / np.sqrt(total / np.float32(d) + np.float32(eps))
        for j in range(d):
            y[i, j] = x[at + j] * r * g[j]


@loops
def _add_norm(first, last, d, px, pr, pg, eps, py, ps):
    x, residual, g = carray(f32(px), (last, d)), carray(f32(pr), (last, d)), carray(f32(pg), (d,))
    y, s = carray(f32(py), (last, d)), carray(f32(ps), (last, d))
    for i in range(first, last):
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
def _qkv(first, t, h, k, e, p, px, stride, pc, ps, slots, pslot, pkc, pvc, pq):
    cos, sin, q = carray(f32(pc), (t, p)), carray(f32(ps), (t, p)), carray(f32(pq), (t, h, e))
    x, slot = carray(f32(px), (t * stride + (h + 2 * k) * e,)), carray(i32(pslot), (t,))
    k_cache, v_cache = carray(f32(pkc), (slots, k, e)), carray(f32(pvc), (slots, k, e))
    for i in range(first, t):
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
def _gate(first, last, f, px, stride, py):
    """silu(x[:, :f]) * x[:, f:], WIDTH channels at a time; those that are left go through a buffer."""
    whole = f // WIDTH * WIDTH
    part = np.zeros((3, WIDTH), np.float32)
    low, high, to = part[0].ctypes.data, part[1].ctypes.data, part[2].ctypes.data
    for i in range(first, last):
        at, out = px + i * stride * 4, py + i * f * 4
        for j in range(0, whole, WIDTH):
            gate(at + j * 4, at + (f + j) * 4, out + j * 4)  # type: ignore[call-arg]
        if whole < f:
            x, y = carray(f32(at), (2 * f,)), carray(f32(out), (f,))
            for j in range(whole, f):
                part[0, j - whole], part[1, j - whole] = x[j], x[f + j]
            gate(low, high, to)  # type: ignore[call-arg]
            for j in range(whole, f):
                y[j] = part[2, j - whole]


def _norm_share(work):
    first, last, d, eps = rows_of_share(work)
    while first < last:
        _norm(first, last, d[0], d[1], d[2], d[3], eps, d[4])
        first, last, d, eps = rows_of_share(work)


def _add_norm_share(work):
    first, last, d, eps = rows_of_share(work)
    while first < last:
        _add_norm(first, last, d[0], d[1], d[2], d[3], eps, d[4], d[5])
        first, last, d, eps = rows_of_share(work)


def _qkv_share(work):
    first, last, d, _ = rows_of_share(work)
    while first < last:
        _qkv(first, last, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8], d[9], d[10], d[11], d[12])
        first, last, d, _ = rows_of_share(work)


def _gate_share(work):
    first, last, d, _ = rows_of_share(work)
    while first < last:
        _gate(first, last, d[0], d[1], d[2], d[3])
        first, last, d, _ = rows_of_share(work)


def _even_rows(x: Tensor) -> Tensor:
    """x as [n, d] with one stride between rows; heads cut out of a wider projection are copied first."""
    return x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])


@kernel(rms_norm, needs={F.NUMBA}, dtypes=FLOAT32, name="numba")
def _rms_norm(x: Tensor, gamma: Tensor, *, eps: float) -> Tensor:
    rows = _even_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    n, operands = rows.shape[0], (rows.shape[1], *rows_of(rows), dense(gamma))
    if n < MANY:
        _norm(0, n, *operands, eps, y.data_ptr())
    else:
        spread(_norm_share, n, eps, *operands, y.data_ptr())
    return y


@kernel(add_rms_norm, needs={F.NUMBA}, dtypes=FLOAT32, name="numba")
def _add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    y, s = torch.empty_like(x), torch.empty_like(x)
    d = x.shape[-1]
    n = x.numel() // max(d, 1)
    operands = d, x.data_ptr(), residual.data_ptr(), dense(gamma)
    if n < MANY:
        _add_norm(0, n, *operands, eps, y.data_ptr(), s.data_ptr())
    else:
        spread(_add_norm_share, n, eps, *operands, y.data_ptr(), s.data_ptr())
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
    operands = (h, k, e, cos.shape[1], *rows_of(qkv), dense(cos), dense(sin), k_cache.shape[0] * k_cache.shape[1],
                dense(slot), dense(k_cache), dense(v_cache), q.data_ptr())
    if t < MANY:
        _qkv(0, t, *operands)
    else:
        spread(_qkv_share, t, 0.0, *operands)
    return q, k_cache, v_cache


@kernel(swiglu, needs={F.NUMBA}, dtypes=FLOAT32, name="numba", priority=1)
def _swiglu(x: Tensor) -> Tensor:
    f = x.shape[-1] // 2
    rows = _even_rows(x)
    y = torch.empty((*x.shape[:-1], f), dtype=x.dtype)
    n = rows.shape[0]
    if n < MANY:
        _gate(0, n, f, *rows_of(rows), y.data_ptr())
    else:
        spread(_gate_share, n, 0.0, f, *rows_of(rows), y.data_ptr())
    return y


@kernel(last_rows, needs={F.TORCH_CPU}, name="index")
def _last_rows(x: Tensor, q_start: Tensor) -> Tensor:
    q = q_start.numpy()
    empty = q[1:] == q[:-1]
    y = x.index_select(0, torch.from_numpy(np.maximum(q[1:] - 1, 0))) if len(x) else x.new_zeros(len(q) - 1, x.shape[1])
    if empty.any():
        y[torch.from_numpy(empty)] = 0
    return y
