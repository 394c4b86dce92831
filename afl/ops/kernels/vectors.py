"""Vector code of attention and gates: exponentials, softmax tile by tile, tiles of products, transposition.

Everything works on addresses of float32 numbers.  The order of all sums is fixed, so the bits of a row's result do not
depend on the rows beside it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from afl.ops.kernels.panel import VECTORS, WIDTH, _const, _f32, _fma, _ints, _load, _vector

KEYS = VECTORS * WIDTH             # keys of one tile
ROWS = 8                           # query rows at once
_LOG2E, _MAGIC = float(np.float32(1.4426950408889634)), 12582912.0          # 1.5 * 2^23: adding it rounds to an integer
_LN2 = 0.693359375, -2.12194440054690583e-4                                 # ln 2 in two parts, the first with 12 bits
# e^r on |r| <= ln 2 / 2, relative error below 2^-24 (Cephes, expf): 1 + r + r^2 * polynomial
_POWERS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _all(value: float) -> Any:
    return _vector([value] * WIDTH)


def _spread(builder: Any, one: Any) -> Any:
    """One number in every lane."""
    nothing = ir.Constant(_vector, ir.Undefined)
    first = builder.insert_element(nothing, one, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, nothing, _ints([0] * WIDTH))


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def exponential(builder: Any, x: Any) -> Any:
    """e^x of a vector: within 1 unit in the last place; 0 below -87.3, infinity above 88.7, NaN stays."""
    small = builder.fcmp_ordered("<", x, _all(-87.3))
    x = builder.select(small, _all(-87.3), x)
    x = builder.select(builder.fcmp_ordered(">", x, _all(89.0)), _all(89.0), x)
    rounded = _fma(builder, x, _all(_LOG2E), _all(_MAGIC))
    n = builder.fsub(rounded, _all(_MAGIC))
    r = x
    for part in _LN2:
        r = _fma(builder, n, _all(-part), r)
    y = _all(_POWERS[0])
    for c in _POWERS[1:]:
        y = _fma(builder, y, r, _all(c))
    y = builder.fadd(_fma(builder, y, builder.fmul(r, r), r), _all(1.0))
    power = builder.add(builder.shl(builder.bitcast(rounded, _ints), _ints([23] * WIDTH)), _ints([127 << 23] * WIDTH))
    return builder.select(small, _all(0.0), builder.fmul(y, builder.bitcast(power, _vector)))


def _reduced(builder: Any, name: str, x: Any) -> Any:
    kind = ir.FunctionType(_f32, [_vector])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}.v16f32"), [x])


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def gate(typingctx, g, u, y):
    """Write silu(g) * u of WIDTH numbers at the addresses g and u to y."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        g, u, y = args
        x = _load(builder, g, _f32, 4)
        below = builder.fadd(_all(1.0), exponential(builder, builder.fsub(_all(-0.0), x)))
        _store(builder, builder.fmul(builder.fdiv(x, below), _load(builder, u, _f32, 4)), y)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), build


@intrinsic
def weigh(typingctx, scores, seen, most, total, shrink):
    """One row of a softmax, KEYS scores further; addresses of the scores, the maximum so far, WIDTH sums, a factor.

    Of the scores only the first `seen` count.  They become e^(score - maximum), 0 beyond; maximum and sums are brought
    up to date, and the factor becomes what earlier weights have to be multiplied with.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, seen, most, total, shrink = args
        at = [builder.add(scores, _const(4 * WIDTH * v)) for v in range(VECTORS)]
        count = builder.trunc(seen, ir.IntType(32))
        lanes = builder.shuffle_vector(
            builder.insert_element(ir.Constant(_ints, ir.Undefined), count, ir.Constant(ir.IntType(32), 0)),
            ir.Constant(_ints, ir.Undefined), _ints([0] * WIDTH))
        xs = []
        for v, address in enumerate(at):
            inside = builder.icmp_signed("<", _ints(list(range(v * WIDTH, (v + 1) * WIDTH))), lanes)
            xs.append(builder.select(inside, _load(builder, address, _f32, 4), _all(float("-inf"))))
        top = xs[0]
        for x in xs[1:]:
            top = _larger(builder, top, x)
        to_most = builder.inttoptr(most, _f32.as_pointer())
        before = builder.load(to_most)
        now = _larger(builder, before, _reduced(builder, "fmax", top))
        builder.store(now, to_most)
        factor = exponential(builder, _spread(builder, builder.fsub(before, now)))
        sums = builder.fmul(_load(builder, total, _f32, 4), factor)
        for x, address in zip(xs, at, strict=True):
            p = exponential(builder, builder.fsub(x, _spread(builder, now)))
            _store(builder, p, address)
            sums = builder.fadd(sums, p)
        _store(builder, sums, total)
        one = builder.extract_element(factor, ir.Constant(ir.IntType(32), 0))
        builder.store(one, builder.inttoptr(shrink, _f32.as_pointer()))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), build


def _product(rows: int, grows: bool) -> Any:
    """Compiled: y[r, 0:KEYS] = sum over k of x[r, k] * w[k, 0:KEYS] for `rows` rows; x, w and y have strides in bytes.

    grows: the sums start from y[r] * shrink[r] and not from 0.
    """

    @intrinsic
    def product(typingctx: Any, x: Any, xs: Any, w: Any, ws: Any, y: Any, ys: Any, k: Any, shrink: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, xs, w, ws, y, ys, k, shrink = args
            starts = [builder.add(x, builder.mul(xs, _const(r))) for r in range(rows)]
            out = [[builder.add(builder.add(y, builder.mul(ys, _const(r))), _const(4 * WIDTH * v))
                    for v in range(VECTORS)] for r in range(rows)]
            sums = [[cgutils.alloca_once(builder, _vector) for _ in range(VECTORS)] for _ in range(rows)]
            for r in range(rows):
                if grows:
                    pointer = builder.inttoptr(builder.add(shrink, _const(4 * r)), _f32.as_pointer())
                    factor = _spread(builder, builder.load(pointer))
                for v in range(VECTORS):
                    first = builder.fmul(_load(builder, out[r][v], _f32, 4), factor) if grows else _all(0.0)
                    builder.store(first, sums[r][v])
            with cgutils.for_range(builder, k) as loop:
                at = builder.add(w, builder.mul(loop.index, ws))
                panel = [_load(builder, builder.add(at, _const(4 * WIDTH * v)), _f32, 4) for v in range(VECTORS)]
                step = builder.mul(loop.index, _const(4))
                for r in range(rows):
                    one = builder.load(builder.inttoptr(builder.add(starts[r], step), _f32.as_pointer()))
                    one = _spread(builder, one)
                    for v in range(VECTORS):
                        builder.store(_fma(builder, one, panel[v], builder.load(sums[r][v])), sums[r][v])
            for r in range(rows):
                for v in range(VECTORS):
                    _store(builder, builder.load(sums[r][v]), out[r][v])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return product


@intrinsic
def transpose(typingctx, x, xs, y, ys):
    """Write WIDTH x WIDTH numbers, rows `xs` bytes apart at x, transposed to y, rows `ys` bytes apart."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, xs, y, ys = args
        rows = [_load(builder, builder.add(x, builder.mul(xs, _const(r))), _f32, 4) for r in range(WIDTH)]
        step = 1
        while step < WIDTH:                        # swap the off-diagonal squares of `step` lanes
            low = [lane if not lane & step else lane - step + WIDTH for lane in range(WIDTH)]
            high = [lane + step if not lane & step else lane + WIDTH for lane in range(WIDTH)]
            for r in range(WIDTH):
                if not r & step:
                    a, b = rows[r], rows[r + step]
                    rows[r] = builder.shuffle_vector(a, b, _ints(low))
                    rows[r + step] = builder.shuffle_vector(a, b, _ints(high))
            step *= 2
        for r, row in enumerate(rows):
            _store(builder, row, builder.add(y, builder.mul(ys, _const(r))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


one_row, two_rows, three_rows, four_rows, all_rows = (_product(n, False) for n in (1, 2, 3, 4, ROWS))
grow_one, grow_two, grow_three, grow_four, grow_all = (_product(n, True) for n in (1, 2, 3, 4, ROWS))
