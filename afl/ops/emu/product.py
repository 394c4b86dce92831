"""The matrix unit: products of 16-bit or float32 operands, summed in float32, each output on its own.

An output is one chain of fused multiply-adds over vectors of inputs, then a tree over the lanes; its bits depend on its
two rows alone, not on the batch and not on how the weight lies.  On a device the order of the sum is unknown.

A weight [o, i] is read where it lies: 16 inputs of an output are one vector, `column` bytes behind those of the output
before, and `chunk` bytes before the next 16 of the same output.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, literally, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from afl.layout import plain
from afl.ops.kernels.loops import loops
from afl.ops.kernels.region import entry, fork, gomp, take
from afl.ops.nz import TILE, memory

WIDTH = 16                              # float32 lanes of one vector
COLUMNS = 8                             # outputs of one tile, at most
RUN = 8 * COLUMNS                       # outputs that a thread takes at a time
SMALL = 1 << 18                         # multiply-adds below which one thread is enough

_f32 = ir.FloatType()
_vector, _ints = ir.VectorType(_f32, WIDTH), ir.VectorType(ir.IntType(32), WIDTH)
_STORED = {0: _f32, 1: ir.IntType(16), 2: ir.HalfType()}
_SIZES = (4, 2, 2)                      # bytes of a weight: float32, bfloat16, float16


def _const(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _widened(builder: Any, address: Any, kind: int, count: int) -> Any:
    """`count` weights at an address as float32: a vector, or a number if count is 1."""
    stored, wide, ints = (_STORED[kind], _f32, ir.IntType(32)) if count == 1 else (
        ir.VectorType(_STORED[kind], count), _vector, _ints)
    value = builder.load(builder.inttoptr(address, stored.as_pointer()))
    value.align = _SIZES[kind]
    if kind == 0:
        return value
    if kind == 2:
        return builder.fpext(value, wide)
    shift = ir.Constant(ints, 16 if count == 1 else [16] * count)
    return builder.bitcast(builder.shl(builder.zext(value, ints), shift), wide)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.f32" if a.type is _f32 else f"llvm.fma.v{WIDTH}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name),
                        [a, b, c])


def _fetch(builder: Any, address: Any) -> None:
    """Ask for a line of memory early: rows of weights are too short for the processor to foresee the next one."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(ask, [builder.inttoptr(address, byte), *(ir.Constant(number, n) for n in (0, 2, 1))])


def _lanes(builder: Any, v: Any) -> Any:
    """The sum of a vector's lanes: halves onto each other."""
    count = WIDTH
    while count > 1:
        count //= 2
        at = [list(range(count)), list(range(count, 2 * count))]
        low, high = (builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(ir.IntType(32), count), i)) for i in at)
        v = builder.fadd(low, high)
    return builder.extract_element(v, ir.Constant(ir.IntType(32), 0))


def _tile(rows: int, columns: int) -> Any:
    """Compiled: y[r, c] = sum over k of x[r, k] * w[c, k] for a few rows and columns at once."""

    @intrinsic
    def tile(
        typingctx: Any, x: Any, w: Any, y: Any, k: Any, stride: Any, column: Any, chunk: Any, kind: Any
    ) -> Any:
        if not isinstance(kind, types.IntegerLiteral):
            return None
        stored, size = kind.literal_value, _SIZES[kind.literal_value]

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, w, y, k, stride, column, chunk, _ = args
            pairs = [(r, c) for r in range(rows) for c in range(columns)]
            sums = {p: cgutils.alloca_once(builder, _vector) for p in pairs}
            for p in pairs:
                builder.store(ir.Constant(_vector, [0.0] * WIDTH), sums[p])
            xs = [builder.add(x, builder.mul(k, _const(4 * r))) for r in range(rows)]
            ws = [builder.add(w, builder.mul(column, _const(c))) for c in range(columns)]

            def step(sums: dict[Any, Any], at: Any, place: Any, count: int) -> None:
                for b in ws if rows == 1 and count > 1 else ():       # the same place in the next tile
                    _fetch(builder, builder.add(builder.add(b, builder.mul(column, _const(columns))), place))
                a = [_widened(builder, builder.add(b, builder.mul(at, _const(4))), 0, count) for b in xs]
                b = [_widened(builder, builder.add(b, place), stored, count) for b in ws]
                for r, c in pairs:
                    builder.store(_fma(builder, a[r], b[c], builder.load(sums[r, c])), sums[r, c])

            times = builder.sdiv(k, _const(WIDTH))
            with cgutils.for_range(builder, times) as loop:
                step(sums, builder.mul(loop.index, _const(WIDTH)), builder.mul(loop.index, chunk), WIDTH)
            whole = {p: cgutils.alloca_once(builder, _f32) for p in pairs}
            for p in pairs:
                builder.store(_lanes(builder, builder.load(sums[p])), whole[p])
            done = builder.mul(times, _const(WIDTH))
            with cgutils.for_range(builder, builder.sub(k, done)) as loop:
                place = builder.add(builder.mul(times, chunk), builder.mul(loop.index, _const(size)))
                step(whole, builder.add(done, loop.index), place, 1)
            for r, c in pairs:
                to = builder.add(y, builder.mul(builder.add(builder.mul(stride, _const(r)), _const(c)), _const(4)))
                builder.store(builder.load(whole[r, c]), builder.inttoptr(to, _f32.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, kind), build

    return tile


_wide1, _wide4 = _tile(1, COLUMNS), _tile(4, 4)
_thin1, _thin4 = _tile(1, 1), _tile(4, 1)


@njit
def _share(work, kind):
    """The work of one thread: runs of outputs, COLUMNS of them at a time against all rows."""
    literally(kind)
    d = carray(work, (9,))
    m, k, o, x, w, y, counter, column, chunk = d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8]
    while True:
        start = take(counter) * RUN  # type: ignore[call-arg]
        if start >= o:
            break
        for first in range(start, min(start + RUN, o), COLUMNS):
            whole = first + COLUMNS <= o
            i = 0
            while i < m:
                n = 4 if i + 4 <= m else 1
                row = x + i * k * 4
                if whole:
                    at, to = w + first * column, y + (i * o + first) * 4
                    if n == 4:
                        _wide4(row, at, to, k, o, column, chunk, kind)
                        _wide4(row, at + 4 * column, to + 16, k, o, column, chunk, kind)
                    else:
                        _wide1(row, at, to, k, o, column, chunk, kind)
                else:
                    for c in range(first, o):
                        at, to = w + c * column, y + (i * o + c) * 4
                        if n == 4:
                            _thin4(row, at, to, k, o, column, chunk, kind)
                        else:
                            _thin1(row, at, to, k, o, column, chunk, kind)
                i += n


def _share_f32(work):
    _share(work, 0)


def _share_bf16(work):
    _share(work, 1)


def _share_f16(work):
    _share(work, 2)


_SHARES = {torch.float32: _share_f32, torch.bfloat16: _share_bf16, torch.float16: _share_f16}


@loops
def _start(parallel, share, threads, m, k, o, x, w, y, column, chunk):
    work = np.empty(10, np.int64)
    work[0], work[1], work[2], work[3], work[4], work[5], work[7], work[8], work[9] = m, k, o, x, w, y, column, chunk, 0
    work[6] = work.ctypes.data + 9 * 8
    fork(parallel, share, work, threads)  # type: ignore[call-arg]


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x [t, i] times w [o, i] transposed: float32 [t, o].  w is float32, bfloat16 or float16, plain or stored in NZ."""
    x = x.float().contiguous()
    (m, k), o = x.shape, w.shape[0]
    if getattr(w, "afl_fmt", "nd") == "nz":
        column, chunk = (s * w.dtype.itemsize for s in (TILE, memory(w).stride(0)))
    else:
        w = plain(w).contiguous()
        column, chunk = k * w.dtype.itemsize, WIDTH * w.dtype.itemsize
    y = torch.empty((m, o), dtype=torch.float32)
    threads = torch.get_num_threads() if m * k * o > SMALL else 1
    _start(gomp(), entry(_SHARES[w.dtype]), threads, m, k, o, x.data_ptr(), w.data_ptr(), y.data_ptr(), column, chunk)
    return y
