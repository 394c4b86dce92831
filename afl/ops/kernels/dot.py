"""Products in integers with weights in quads (`afl/ops/quads.py`): four bytes of 16 outputs at a time.

The sum of a group of 32 is exact; groups are added up in order in float32, so a row's result has the same bits whatever
the batch, the number of threads and the place of the row.  Processors with AVX-512 VNNI have an instruction for it,
others do the same byte by byte.
"""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, literally, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ops.kernels.loops import f32, i8, i32, loops, processor_has
from afl.ops.kernels.panel import (
    SMALL,
    VECTORS,
    WIDTH,
    _const,
    _f32,
    _floats,
    _fma,
    _ints,
    _load,
    _vector,
)
from afl.ops.kernels.region import entry, fork, gomp, take
from afl.ops.panels import LANES, panels
from afl.ops.quads import GROUP, QUADS, QUADS4, quads
from afl.ops.quant import int4, int8
from afl.ops.quant.dynamic import linear_int4_dynamic, linear_int8_dynamic
from afl.ops.quant.int4 import embed_int4
from afl.ops.quant.int8 import embed_int8

TILE = 4                                # rows at once
INT8, INT4 = 0, 1                       # kinds of weight
BYTES = {INT8: LANES * 4, INT4: LANES * 2}      # of four inputs of a panel


@loops
def _round(m, k, groups, px, pq, ps, pc):
    """x [m, k] as bytes q [m, groups, 32], scales s and sums c [m, groups]; a group that is not finite gets NaN."""
    x, q = carray(f32(px), (m, k)), carray(i8(pq), (m, groups * GROUP))
    s, c = carray(f32(ps), (m, groups)), carray(i32(pc), (m, groups))
    for i in range(m):
        for g in range(groups):
            first = g * GROUP
            n = min(GROUP, k - first)
            most, bad = np.float32(0), np.float32(0)
            for j in range(n):
                v = x[i, first + j]
                most = max(most, abs(v))
                bad += v * np.float32(0)
            total = 0
            inverse = np.float32(127) / most if most > 0 else np.float32(np.inf)
            if bad == 0 and inverse < np.float32(np.inf):          # infinite for numbers too small for one
                for j in range(n):
                    r = np.int32(np.rint(x[i, first + j] * inverse))
                    q[i, first + j] = r
                    total += r
                s[i, g] = most / np.float32(127)
            else:
                for j in range(n):
                    q[i, first + j] = 0
                s[i, g] = bad
            for j in range(n, GROUP):
                q[i, first + j] = 0
            c[i, g] = total


def _dot(builder: Any, total: Any, w: Any, x: Any) -> Any:
    """total + the four products of unsigned bytes of w with signed bytes of x, in each of WIDTH int32 lanes."""
    if processor_has("avx512vnni"):
        kind = ir.FunctionType(_ints, [_ints] * 3)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [total, w, x])
    for byte in range(4):
        a = builder.and_(builder.lshr(w, _ints([8 * byte] * WIDTH)), _ints([255] * WIDTH))
        b = builder.ashr(builder.shl(x, _ints([24 - 8 * byte] * WIDTH)), _ints([24] * WIDTH))
        total = builder.add(total, builder.mul(a, b))
    return total


def _spread(builder: Any, address: Any, element: Any) -> Any:
    """WIDTH copies of the number at an address."""
    kind = ir.VectorType(element, WIDTH)
    one = builder.load(builder.inttoptr(address, element.as_pointer()))
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), one, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _ints([0] * WIDTH))


def _weights(builder: Any, address: Any, kind: int) -> list[Any]:
    """Four inputs of LANES outputs as VECTORS vectors of unsigned bytes; those of 8 bits are 128 too large."""
    if kind == INT4:
        packed, low = _load(builder, address, ir.IntType(32), 1), _ints([0x0F0F0F0F] * WIDTH)
        return [builder.and_(packed, low), builder.and_(builder.lshr(packed, _ints([4] * WIDTH)), low)]
    sign = _ints([-0x7F7F7F80] * WIDTH)          # 0x80 in every byte
    both = [_load(builder, builder.add(address, _const(v * WIDTH * 4)), ir.IntType(32), 1) for v in range(VECTORS)]
    return [builder.xor(w, sign) for w in both]


def _tile(rows: int) -> Any:
    """Compiled: y[r, 0:32] = sum over groups of x's numbers times a panel's, times both scales, for `rows` rows."""

    @intrinsic
    def tile(typingctx: Any, q: Any, s: Any, c: Any, w: Any, y: Any, groups: Any, stride: Any, scale: Any, low: Any,
             kind: Any):
        if not isinstance(kind, types.IntegerLiteral):
            return None
        stored = kind.literal_value

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            q, s, c, w, y, groups, stride, scale, low, _ = args
            word = ir.IntType(32)
            sums = [[cgutils.alloca_once(builder, _vector) for _ in range(VECTORS)] for _ in range(rows)]
            for each in (v for row in sums for v in row):
                builder.store(_vector([0.0] * WIDTH), each)

            def row(base: Any, r: int, at: Any, size: int) -> Any:
                """Address of entry [r, at] of an array of `groups` entries of that size a row."""
                return builder.add(base, builder.mul(builder.add(builder.mul(groups, _const(r)), at), _const(size)))

            with cgutils.for_range(builder, groups) as loop:
                g = loop.index
                totals = []
                for r in range(rows):
                    start = _ints([0] * WIDTH)
                    if stored == INT8:
                        start = builder.mul(_spread(builder, row(c, r, g, 4), word), _ints([-128] * WIDTH))
                    totals.append([start] * VECTORS)
                for quad in range(GROUP // 4):
                    at = builder.add(builder.mul(g, _const(GROUP // 4)), _const(quad))
                    ws = _weights(builder, builder.add(w, builder.mul(at, _const(BYTES[stored]))), stored)
                    for r in range(rows):
                        x = _spread(builder, builder.add(row(q, r, g, GROUP), _const(4 * quad)), word)
                        totals[r] = [_dot(builder, t, v, x) for t, v in zip(totals[r], ws, strict=True)]
                first = builder.mul(g, _const(LANES * 2))

                def numbers(base: Any, first: Any = first) -> list[Any]:
                    at = [builder.add(builder.add(base, first), _const(v * WIDTH * 2)) for v in range(VECTORS)]
                    return [_floats(builder, a, "f16") for a in at]

                scales, lows = numbers(scale), numbers(low) if stored == INT4 else []
                for r in range(rows):
                    step = _spread(builder, row(s, r, g, 4), _f32)
                    for v in range(VECTORS):
                        found = builder.sitofp(totals[r][v], _vector)
                        both = builder.fmul(scales[v], step)
                        total = _fma(builder, found, both, builder.load(sums[r][v]))
                        if stored == INT4:
                            number = builder.sitofp(_spread(builder, row(c, r, g, 4), word), _vector)
                            total = _fma(builder, lows[v], builder.fmul(number, step), total)
                        builder.store(total, sums[r][v])
            for r in range(rows):
                base = builder.add(y, builder.mul(stride, _const(4 * r)))
                for v in range(VECTORS):
                    to = builder.inttoptr(builder.add(base, _const(v * WIDTH * 4)), _vector.as_pointer())
                    builder.store(builder.load(sums[r][v]), to).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9, kind), build

    return tile


_one, _two, _four = _tile(1), _tile(2), _tile(TILE)


@njit
def _share(work, kind):
    """The work of one thread: chunks of panels, each against all rows."""
    literally(kind)
    d = carray(work, (16,))
    counter, chunks, chunk, count, m, groups = d[0], d[1], d[2], d[3], d[4], d[5]
    q, s, c, w, y, scale, low, stride = d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13]
    w_bytes, s_bytes = groups * GROUP * (LANES if kind == 0 else LANES // 2), groups * LANES * 2
    while True:
        n = take(counter)  # type: ignore[call-arg]
        if n >= chunks:
            break
        for p in range(n * chunk, min(count, (n + 1) * chunk)):
            panel, to, a, b = w + p * w_bytes, y + p * LANES * 4, scale + p * s_bytes, low + p * s_bytes
            i = 0
            while i + TILE <= m:
                _four(q + i * groups * GROUP, s + i * groups * 4, c + i * groups * 4, panel, to + i * stride * 4,
                      groups, stride, a, b, kind)
                i += TILE
            if i + 2 <= m:
                _two(q + i * groups * GROUP, s + i * groups * 4, c + i * groups * 4, panel, to + i * stride * 4,
                     groups, stride, a, b, kind)
                i += 2
            if i < m:
                _one(q + i * groups * GROUP, s + i * groups * 4, c + i * groups * 4, panel, to + i * stride * 4,
                     groups, stride, a, b, kind)


def _share_int8(work):
    _share(work, 0)


def _share_int4(work):
    _share(work, 1)


@loops
def _start(parallel, share, threads, chunk, count, m, k, groups, x, w, y, scale, low):
    numbers, steps = np.empty((m, groups * GROUP), np.int8), np.empty((m, groups), np.float32)
    sums = np.empty((m, groups), np.int32)
    _round(m, k, groups, x, numbers.ctypes.data, steps.ctypes.data, sums.ctypes.data)
    work = np.empty(16, np.int64)
    work[15] = 0
    work[0], work[1], work[2] = work.ctypes.data + 15 * 8, (count + chunk - 1) // chunk, chunk
    work[3], work[4], work[5] = count, m, groups
    work[6], work[7], work[8] = numbers.ctypes.data, steps.ctypes.data, sums.ctypes.data
    work[9], work[10], work[11], work[12], work[13] = w, y, scale, low, count * LANES
    fork(parallel, share, work, threads)  # type: ignore[call-arg]
    return numbers[0, 0] + steps[0, 0] + sums[0, 0]         # they must live until here


def multiply(x: Tensor, q: Tensor, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """x [t, i], rounded to 8 bits per row and group, times a stored weight [o, i] in quads: float32 [t, o]."""
    x = x.float().contiguous()
    m, k = x.shape
    o = q.shape[0]
    count = math.ceil(o / LANES)
    y = torch.empty((m, count * LANES), dtype=torch.float32)
    if m and o and k:
        threads = torch.get_num_threads() if m * k * o > SMALL else 1
        share = entry(_share_int8 if low is None else _share_int4)
        _start(gomp(), share, threads, max(1, count // (4 * threads)), count, m, k, scale.shape[1], x.data_ptr(),
               q.data_ptr(), y.data_ptr(), scale.data_ptr(), 0 if low is None else low.data_ptr())
    elif m and o:
        y.zero_()
    return y if o % LANES == 0 else y[:, :o].contiguous()


def _half(*types: Any, **params: Any) -> bool:
    """scales in float16"""
    return types[2].dtype == torch.float16


_INT8 = {"q": QUADS, "scale": "panel"}
_INT4 = {"q": QUADS4, "scale": "panel", "low": "panel"}


@kernel(linear_int8_dynamic, needs={F.NUMBA}, fmt=_INT8, when=_half, name="dot")
def _linear_int8(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, *, dtype: torch.dtype | None) -> Tensor:
    y = multiply(x, q, scale)
    return (y if bias is None else y.add_(bias)).to(dtype or x.dtype)


@kernel(linear_int4_dynamic, needs={F.NUMBA}, fmt=_INT4, when=_half, name="dot")
def _linear_int4(
    x: Tensor, q: Tensor, scale: Tensor, low: Tensor, bias: Tensor | None, *, dtype: torch.dtype | None
) -> Tensor:
    y = multiply(x, q, scale, low)
    return (y if bias is None else y.add_(bias)).to(dtype or x.dtype)


def _rows(stored: Tensor, id: Tensor) -> Tensor:
    """Logical rows [t, i] of a matrix of 8 bits in quads."""
    return quads(stored)[id // LANES, :, id % LANES].flatten(1)[:, : stored.shape[1]]


def _scales(stored: Tensor, id: Tensor) -> Tensor:
    return panels(stored)[id // LANES, :, id % LANES]


def _known(token: Tensor, rows: int) -> Tensor:
    id = token.long()
    if len(id) and not (0 <= id.min() and id.max() < rows):
        raise IndexError(f"token ids run from {int(id.min())} to {int(id.max())}, the matrix has rows 0 to {rows - 1}")
    return id


@kernel(embed_int8, needs={F.NUMBA}, fmt=_INT8, name="quads")
def _embed_int8(token: Tensor, q: Tensor, scale: Tensor, *, group: int, dtype: torch.dtype) -> Tensor:
    """Raises IndexError on an id outside the matrix."""
    id = _known(token, q.shape[0])
    return int8.decoded(_rows(q, id), _scales(scale, id), group).to(dtype)


@kernel(embed_int4, needs={F.NUMBA}, fmt=_INT4, name="quads")
def _embed_int4(token: Tensor, q: Tensor, scale: Tensor, low: Tensor, *, group: int, dtype: torch.dtype) -> Tensor:
    """Raises IndexError on an id outside the matrix."""
    id = _known(token, q.shape[0])
    half, lane = LANES // 2, id % LANES
    both = quads(q)[id // LANES, :, lane % half].flatten(1)[:, : q.shape[1]]
    numbers = torch.where(lane[:, None] < half, both & 15, both >> 4)
    return int4.decoded(numbers, _scales(scale, id), _scales(low, id), group).to(dtype)
