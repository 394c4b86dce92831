"""Products with weights in panels (`afl/ops/panels.py`): float32 sums in the order of the inputs.

A row's result has the same bits whatever the batch, the number of threads and the place of the row: every output is one
chain of fused multiply-adds.  Weights of 16 bits are widened as they are read.
"""

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
from afl.ops.embed import embed
from afl.ops.kernels.loops import loops
from afl.ops.kernels.region import entry, fork, gomp, take
from afl.ops.linear import linear, logits
from afl.ops.panels import LANES, panels

WIDTH = 16                         # float32 lanes of one register
VECTORS = LANES // WIDTH
UNROLL = 4
SMALL = 1 << 18                    # multiply-adds below which waking the other threads costs more than it saves

_f32 = ir.FloatType()
_vector = ir.VectorType(_f32, WIDTH)
_SIZES = (4, 2, 2)                  # bytes of a weight: float32, bfloat16, float16


def _const(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _widen(builder: Any, address: Any, kind: int) -> Any:
    """WIDTH weights at an address as float32."""
    stored = {0: _vector, 1: ir.VectorType(ir.IntType(16), WIDTH), 2: ir.VectorType(ir.HalfType(), WIDTH)}[kind]
    value = builder.load(builder.inttoptr(address, stored.as_pointer()))
    value.align = 2 if kind else 4
    if kind == 0:
        return value
    if kind == 2:
        return builder.fpext(value, _vector)
    wide = ir.VectorType(ir.IntType(32), WIDTH)
    bits = builder.shl(builder.zext(value, wide), ir.Constant(wide, [16] * WIDTH))
    return builder.bitcast(bits, _vector)


def _tile(rows: int) -> Any:
    """Compiled: y[r, 0:32] = sum over k of x[r, k] * panel[k, 0:32], for `rows` rows at once."""

    @intrinsic
    def tile(typingctx: Any, x: Any, w: Any, y: Any, k: Any, stride: Any, kind: Any) -> Any:
        if not isinstance(kind, types.IntegerLiteral):
            return None
        stored = kind.literal_value

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, w, y, k, stride, _ = args
            size = _SIZES[stored]
            name = f"llvm.fma.v{WIDTH}f32"
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_vector, [_vector] * 3), name)
            sums = [[cgutils.alloca_once(builder, _vector) for _ in range(VECTORS)] for _ in range(rows)]
            for each in (s for row in sums for s in row):
                builder.store(ir.Constant(_vector, [0.0] * WIDTH), each)
            start = builder.inttoptr(x, _f32.as_pointer())
            xs = [builder.gep(start, [builder.mul(k, _const(r))]) for r in range(rows)]
            nothing = ir.Constant(_vector, ir.Undefined)
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)

            def step(at: Any) -> None:
                base = builder.add(w, builder.mul(at, _const(LANES * size)))
                ws = [_widen(builder, builder.add(base, _const(v * WIDTH * size)), stored) for v in range(VECTORS)]
                for r in range(rows):
                    one = builder.load(builder.gep(xs[r], [at]))
                    first = builder.insert_element(nothing, one, ir.Constant(ir.IntType(32), 0))
                    spread = builder.shuffle_vector(first, nothing, lanes)
                    for v in range(VECTORS):
                        builder.store(builder.call(fma, [spread, ws[v], builder.load(sums[r][v])]), sums[r][v])

            times = builder.sdiv(k, _const(UNROLL))
            with cgutils.for_range(builder, times) as loop:
                at = builder.mul(loop.index, _const(UNROLL))
                for u in range(UNROLL):
                    step(builder.add(at, _const(u)))
            done = builder.mul(times, _const(UNROLL))
            with cgutils.for_range(builder, builder.sub(k, done)) as loop:
                step(builder.add(done, loop.index))
            for r in range(rows):
                base = builder.add(y, builder.mul(stride, _const(4 * r)))
                for v in range(VECTORS):
                    to = builder.inttoptr(builder.add(base, _const(v * WIDTH * 4)), _vector.as_pointer())
                    builder.store(builder.load(sums[r][v]), to).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5, kind), build

    return tile


_one, _two, _four, _eight = (_tile(rows) for rows in (1, 2, 4, 8))


@njit
def _share(work, kind):
    """The work of one thread: chunks of panels, each against all rows."""
    literally(kind)
    d = carray(work, (11,))
    chunks, chunk, count, m, k, x, w, y, stride, counter, size = (
        d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8], d[9], d[10])
    while True:
        c = take(counter)  # type: ignore[call-arg]
        if c >= chunks:
            break
        for p in range(c * chunk, min(count, (c + 1) * chunk)):
            panel, to, i = w + p * k * LANES * size, y + p * LANES * 4, 0
            while i + 8 <= m:
                _eight(x + i * k * 4, panel, to + i * stride * 4, k, stride, kind)
                i += 8
            if i + 4 <= m:
                _four(x + i * k * 4, panel, to + i * stride * 4, k, stride, kind)
                i += 4
            if i + 2 <= m:
                _two(x + i * k * 4, panel, to + i * stride * 4, k, stride, kind)
                i += 2
            if i < m:
                _one(x + i * k * 4, panel, to + i * stride * 4, k, stride, kind)


def _share_f32(work):
    _share(work, 0)


def _share_bf16(work):
    _share(work, 1)


def _share_f16(work):
    _share(work, 2)


_SHARES = {torch.float32: _share_f32, torch.bfloat16: _share_bf16, torch.float16: _share_f16}


@loops
def _start(parallel, share, threads, chunks, chunk, count, m, k, x, w, y, stride, size):
    work = np.empty(12, np.int64)
    work[0], work[1], work[2], work[3], work[4], work[5] = chunks, chunk, count, m, k, x
    work[6], work[7], work[8], work[10], work[11] = w, y, stride, size, 0
    work[9] = work.ctypes.data + 11 * 8
    fork(parallel, share, work.ctypes.data, threads)  # type: ignore[call-arg]


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x [t, i] times a stored weight [o, i] in panels: float32 [t, o]."""
    x = x.float().contiguous()
    m, k = x.shape
    o = w.shape[0]
    count = -(-o // LANES)
    y = torch.empty((m, count * LANES), dtype=torch.float32)
    threads = torch.get_num_threads() if m * k * o > SMALL else 1
    chunk = max(1, count // (4 * threads))
    _start(gomp(), entry(_SHARES[w.dtype]), threads, -(-count // chunk), chunk, count, m, k,
           x.data_ptr(), w.data_ptr(), y.data_ptr(), count * LANES, w.dtype.itemsize)
    return y if o % LANES == 0 else y[:, :o].contiguous()


@kernel(linear, needs={F.NUMBA}, fmt={"w": "panel"}, name="panel", priority=1)
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = multiply(x, w)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


@kernel(logits, needs={F.NUMBA}, fmt={"w": "panel"}, name="panel", priority=1)
def _logits(x: Tensor, w: Tensor) -> Tensor:
    return multiply(x, w)


@kernel(embed, needs={F.NUMBA}, fmt={"w": "panel"}, name="panel", priority=1)
def _embed(token: Tensor, w: Tensor) -> Tensor:
    """Raises IndexError on an id outside the matrix."""
    id = token.numpy()
    if len(id) and not (0 <= id.min() and id.max() < w.shape[0]):
        raise IndexError(f"token ids run from {id.min()} to {id.max()}, the matrix has rows 0 to {w.shape[0] - 1}")
    return panels(w)[torch.from_numpy(id // LANES), :, torch.from_numpy(id % LANES)]
