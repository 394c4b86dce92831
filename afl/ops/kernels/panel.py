"""Products with weights in panels (`afl/ops/panels.py`): float32 sums in the order of the inputs.

A row's result has the same bits whatever the batch, the number of threads and the place of the row: every output is one
chain of fused multiply-adds (of products and sums where the processor has none).  Weights of fewer bits are widened to
float32 as they are read, exactly; those of 4 and 8 bits are a whole number times their group's scale (plus its lowest
value), so that a product equals, bit for bit, the one with the same values stored as float32.
"""

from collections.abc import Callable
from typing import Any

import attrs
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
from afl.ops.kernels.loops import loops, processor_has
from afl.ops.kernels.region import entry, fork, gomp, take
from afl.ops.linear import linear, logits
from afl.ops.panels import LANES, panels
from afl.ops.quant import int4, int8
from afl.ops.quant.int4 import embed_int4, linear_int4
from afl.ops.quant.int8 import embed_int8, linear_int8

WIDTH = 16                         # float32 lanes of one register
VECTORS = LANES // WIDTH
UNROLL = 4
TILE = 8                           # rows at once
SMALL = 1 << 18                    # multiply-adds below which waking the other threads costs more than it saves

_f32 = ir.FloatType()
_vector = ir.VectorType(_f32, WIDTH)
_ints = ir.VectorType(ir.IntType(32), WIDTH)


@attrs.frozen
class Kind:
    """How a weight is stored: bytes of one input's LANES weights, dtype of scales if any, whether lowest values."""

    weight: str
    bytes: int
    scale: str | None = None
    low: bool = False


KINDS = (
    Kind("f32", 4 * LANES), Kind("bf16", 2 * LANES), Kind("f16", 2 * LANES),
    Kind("i8", LANES, "f16"), Kind("i8", LANES, "f32"), Kind("i4", LANES // 2, "f16", True),
    Kind("i4", LANES // 2, "f32", True),
)
SCALES = frozenset({torch.float16, torch.float32})
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "i8", torch.uint8: "i4"}


def kind_of(w: Tensor, scale: Tensor | None) -> int:
    """Index into KINDS of a stored weight and its scales."""
    return next(i for i, k in enumerate(KINDS)
                if k.weight == _NAMES[w.dtype] and k.scale == (scale if scale is None else _NAMES[scale.dtype]))


def _const(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _load(builder: Any, address: Any, element: Any, align: int, count: int = WIDTH) -> Any:
    value = builder.load(builder.inttoptr(address, ir.VectorType(element, count).as_pointer()))
    value.align = align
    return value


def _floats(builder: Any, address: Any, dtype: str) -> Any:
    """WIDTH numbers at an address as float32."""
    if dtype == "f32":
        return _load(builder, address, _f32, 4)
    if dtype == "f16":
        if processor_has("f16c"):
            return builder.fpext(_load(builder, address, ir.HalfType(), 2), _vector)
        return _half(builder, builder.zext(_load(builder, address, ir.IntType(16), 2), _ints))
    if dtype == "i8":
        return builder.sitofp(builder.sext(_load(builder, address, ir.IntType(8), 1), _ints), _vector)
    bits = builder.shl(builder.zext(_load(builder, address, ir.IntType(16), 2), _ints), _ints([16] * WIDTH))
    return builder.bitcast(bits, _vector)


def _half(builder: Any, bits: Any) -> Any:
    """WIDTH float16 numbers as float32, by their bits: LLVM would call a function that need not be there."""
    sign = builder.shl(builder.and_(bits, _ints([0x8000] * WIDTH)), _ints([16] * WIDTH))
    rest = builder.shl(builder.and_(bits, _ints([0x7FFF] * WIDTH)), _ints([13] * WIDTH))
    # the exponents' biases differ by 112; subnormal numbers become normal ones, infinity and NaN keep all ones
    number = builder.bitcast(builder.fmul(builder.bitcast(rest, _vector), _vector([2.0**112] * WIDTH)), _ints)
    special = builder.icmp_unsigned(">=", rest, _ints([0x7C00 << 13] * WIDTH))
    number = builder.select(special, builder.or_(rest, _ints([0x7F800000] * WIDTH)), number)
    return builder.bitcast(builder.or_(number, sign), _vector)


def _weights(builder: Any, address: Any, kind: Kind, scales: list[Any], lows: list[Any]) -> list[Any]:
    """The LANES weights of one input as VECTORS vectors of float32."""
    if kind.weight == "i4":                       # lane l in the low, lane l + 16 in the high half of byte l
        packed = builder.zext(_load(builder, address, ir.IntType(8), 1), _ints)
        halves = builder.and_(packed, _ints([15] * WIDTH)), builder.lshr(packed, _ints([4] * WIDTH))
        ws = [builder.sitofp(h, _vector) for h in halves]
    else:
        size = kind.bytes // LANES
        ws = [_floats(builder, builder.add(address, _const(v * WIDTH * size)), kind.weight) for v in range(VECTORS)]
    if kind.low:
        return [_fma(builder, w, s, low) for w, s, low in zip(ws, scales, lows, strict=True)]
    return [builder.fmul(w, s) for w, s in zip(ws, scales, strict=True)] if kind.scale else ws


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once if the processor can: emulated it would be a hundred times slower."""
    if not processor_has("fma"):
        return builder.fadd(builder.fmul(a, b), c)
    kind = ir.FunctionType(_vector, [_vector] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDTH}f32"), [a, b, c])


def _inputs(builder: Any, kind: Kind, w: Any, k: Any, group: Any, scale: Any, low: Any, step: Any) -> None:
    """Run step(k, weights of input k) over all inputs, reading scales once a group."""
    def span(first: Any, count: Any, scales: list[Any], lows: list[Any]) -> None:
        def one(at: Any) -> None:
            address = builder.add(w, builder.mul(at, _const(kind.bytes)))
            step(at, _weights(builder, address, kind, scales, lows))

        times = builder.sdiv(count, _const(UNROLL))
        with cgutils.for_range(builder, times) as loop:
            at = builder.add(first, builder.mul(loop.index, _const(UNROLL)))
            for u in range(UNROLL):
                one(builder.add(at, _const(u)))
        done = builder.mul(times, _const(UNROLL))
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            one(builder.add(builder.add(first, done), loop.index))

    if kind.scale is None:
        span(_const(0), k, [], [])
        return
    size = {"f32": 4, "f16": 2}[kind.scale]
    groups = builder.sdiv(builder.add(k, builder.sub(group, _const(1))), group)
    with cgutils.for_range(builder, groups) as loop:
        first = builder.mul(loop.index, group)
        left = builder.sub(k, first)
        count = builder.select(builder.icmp_signed("<", left, group), left, group)
        row = builder.mul(loop.index, _const(LANES * size))

        def read(base: Any, row: Any = row) -> list[Any]:
            return [_floats(builder, builder.add(builder.add(base, row), _const(v * WIDTH * size)), kind.scale or "")
                    for v in range(VECTORS)]

        span(first, count, read(scale), read(low) if kind.low else [])


def _tile(rows: int) -> Any:
    """Compiled: y[r, 0:32] = sum over k of x[r, k] * panel[k, 0:32], for `rows` rows at once."""

    @intrinsic
    def tile(typingctx: Any, x: Any, w: Any, y: Any, k: Any, stride: Any, group: Any, scale: Any, low: Any, kind: Any):
        if not isinstance(kind, types.IntegerLiteral):
            return None
        stored = KINDS[kind.literal_value]

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, w, y, k, stride, group, scale, low, _ = args
            sums = [[cgutils.alloca_once(builder, _vector) for _ in range(VECTORS)] for _ in range(rows)]
            for each in (s for row in sums for s in row):
                builder.store(_vector([0.0] * WIDTH), each)
            start = builder.inttoptr(x, _f32.as_pointer())
            xs = [builder.gep(start, [builder.mul(k, _const(r))]) for r in range(rows)]
            nothing = ir.Constant(_vector, ir.Undefined)

            def step(at: Any, ws: list[Any]) -> None:
                for r in range(rows):
                    one = builder.load(builder.gep(xs[r], [at]))
                    first = builder.insert_element(nothing, one, ir.Constant(ir.IntType(32), 0))
                    spread = builder.shuffle_vector(first, nothing, _ints([0] * WIDTH))
                    for v in range(VECTORS):
                        builder.store(_fma(builder, spread, ws[v], builder.load(sums[r][v])), sums[r][v])

            _inputs(builder, stored, w, k, group, scale, low, step)
            for r in range(rows):
                base = builder.add(y, builder.mul(stride, _const(4 * r)))
                for v in range(VECTORS):
                    to = builder.inttoptr(builder.add(base, _const(v * WIDTH * 4)), _vector.as_pointer())
                    builder.store(builder.load(sums[r][v]), to).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8, kind), build

    return tile


@intrinsic
def _unpack(typingctx, w, to, k, group, scale, low, kind):
    """Compiled: a panel as float32 [k, 32]."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    stored = KINDS[kind.literal_value]

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, to, k, group, scale, low, _ = args

        def step(at: Any, ws: list[Any]) -> None:
            base = builder.add(to, builder.mul(at, _const(4 * LANES)))
            for v in range(VECTORS):
                address = builder.inttoptr(builder.add(base, _const(v * WIDTH * 4)), _vector.as_pointer())
                builder.store(ws[v], address).align = 4

        _inputs(builder, stored, w, k, group, scale, low, step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, kind), build


_one, _two, _four, _eight = (_tile(rows) for rows in (1, 2, 4, TILE))


@njit
def _rows(m, k, x, panel, to, stride, group, scale, low, kind):
    """All rows of x against one panel."""
    literally(kind)
    i = 0
    while i + TILE <= m:
        _eight(x + i * k * 4, panel, to + i * stride * 4, k, stride, group, scale, low, kind)
        i += TILE
    if i + 4 <= m:
        _four(x + i * k * 4, panel, to + i * stride * 4, k, stride, group, scale, low, kind)
        i += 4
    if i + 2 <= m:
        _two(x + i * k * 4, panel, to + i * stride * 4, k, stride, group, scale, low, kind)
        i += 2
    if i < m:
        _one(x + i * k * 4, panel, to + i * stride * 4, k, stride, group, scale, low, kind)


@njit
def _share(work, kind):
    """The work of one thread: chunks of panels, each against all rows.  Many rows pay for widening a panel once."""
    literally(kind)
    d = carray(work, (16,))
    counter, chunks, chunk, count, m, k = d[0], d[1], d[2], d[3], d[4], d[5]
    x, w, y, scale, low, stride, group, w_bytes, s_bytes = d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13], d[14]
    wide = np.empty(k * LANES if kind != 0 and m > TILE else 0, np.float32)
    while True:
        c = take(counter)  # type: ignore[call-arg]
        if c >= chunks:
            break
        for p in range(c * chunk, min(count, (c + 1) * chunk)):
            panel, to, s, b = w + p * w_bytes, y + p * LANES * 4, scale + p * s_bytes, low + p * s_bytes
            if kind != 0 and m > TILE:
                _unpack(panel, wide.ctypes.data, k, group, s, b, kind)  # type: ignore[call-arg]
                _rows(m, k, x, wide.ctypes.data, to, stride, group, s, b, 0)
            else:
                _rows(m, k, x, panel, to, stride, group, s, b, kind)


def _share_f32(work):
    _share(work, 0)


def _share_bf16(work):
    _share(work, 1)


def _share_f16(work):
    _share(work, 2)


def _share_i8_f16(work):
    _share(work, 3)


def _share_i8_f32(work):
    _share(work, 4)


def _share_i4_f16(work):
    _share(work, 5)


def _share_i4_f32(work):
    _share(work, 6)


_SHARES = _share_f32, _share_bf16, _share_f16, _share_i8_f16, _share_i8_f32, _share_i4_f16, _share_i4_f32


@loops
def _start(parallel, share, threads, chunk, count, m, k, x, w, y, scale, low, stride, group, w_bytes, s_bytes):
    work = np.empty(16, np.int64)
    work[15] = 0
    work[0], work[1], work[2] = work.ctypes.data + 15 * 8, (count + chunk - 1) // chunk, chunk
    work[3], work[4] = count, m
    work[5], work[6], work[7], work[8], work[9], work[10] = k, x, w, y, scale, low
    work[11], work[12], work[13], work[14] = stride, group, w_bytes, s_bytes
    fork(parallel, share, work, threads)  # type: ignore[call-arg]


def multiply(
    x: Tensor, w: Tensor, scale: Tensor | None = None, low: Tensor | None = None, group: int = 1
) -> Tensor:
    """x [t, i] times a stored weight [o, i] in panels: float32 [t, o].

    scale, low: [o, groups] in panels; weight (o, j) is w[o, j] * scale[o, j // group] + low[o, j // group].
    """
    x = x.float().contiguous()
    m, k = x.shape
    o = w.shape[0]
    count = -(-o // LANES)
    y = torch.empty((m, count * LANES), dtype=torch.float32)
    threads = torch.get_num_threads() if m * k * o > SMALL else 1
    kind = kind_of(w, scale)
    s_bytes = 0 if scale is None else scale.shape[1] * LANES * scale.itemsize
    _start(gomp(), entry(_SHARES[kind]), threads, max(1, count // (4 * threads)), count, m, k, x.data_ptr(),
           w.data_ptr(), y.data_ptr(), 0 if scale is None else scale.data_ptr(), 0 if low is None else low.data_ptr(),
           count * LANES, group, k * KINDS[kind].bytes, s_bytes)
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
    return _lookup(token, w.shape[0])(panels(w))


def _lookup(token: Tensor, rows: int) -> Callable[..., Tensor]:
    """What reads the rows of these ids out of the memory of a panelled matrix."""
    id = token.numpy()
    if len(id) and not (0 <= id.min() and id.max() < rows):
        raise IndexError(f"token ids run from {id.min()} to {id.max()}, the matrix has rows 0 to {rows - 1}")
    panel, lane = torch.from_numpy(id // LANES), id % LANES
    return lambda memory, lanes=LANES: memory[panel, :, torch.from_numpy(lane % lanes)]


_INT8 = {"q": "panel", "scale": "panel"}
_INT4 = {"q": "panel4", "scale": "panel", "low": "panel"}


@kernel(linear_int8, needs={F.NUMBA}, fmt=_INT8, when=lambda x, q, scale, *_, group, dtype: scale.dtype in SCALES,
        name="panel")
def _linear_int8(
    x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, *, group: int, dtype: torch.dtype | None
) -> Tensor:
    y = multiply(x, q, scale, None, group)
    return (y if bias is None else y.add_(bias)).to(dtype or x.dtype)


@kernel(linear_int4, needs={F.NUMBA}, fmt=_INT4, when=lambda x, q, scale, *_, group, dtype: scale.dtype in SCALES,
        name="panel")
def _linear_int4(
    x: Tensor, q: Tensor, scale: Tensor, low: Tensor, bias: Tensor | None, *, group: int, dtype: torch.dtype | None
) -> Tensor:
    y = multiply(x, q, scale, low, group)
    return (y if bias is None else y.add_(bias)).to(dtype or x.dtype)


@kernel(embed_int8, needs={F.NUMBA}, fmt=_INT8, name="panel")
def _embed_int8(token: Tensor, q: Tensor, scale: Tensor, *, group: int, dtype: torch.dtype) -> Tensor:
    """Raises IndexError on an id outside the matrix."""
    rows = _lookup(token, q.shape[0])
    return int8.decoded(rows(panels(q)), rows(panels(scale)), group).to(dtype)


@kernel(embed_int4, needs={F.NUMBA}, fmt=_INT4, name="panel")
def _embed_int4(token: Tensor, q: Tensor, scale: Tensor, low: Tensor, *, group: int, dtype: torch.dtype) -> Tensor:
    """Raises IndexError on an id outside the matrix."""
    rows = _lookup(token, q.shape[0])
    lane = token.long()[:, None] % LANES
    both = rows(panels(q), LANES // 2)
    numbers = torch.where(lane < LANES // 2, both & 15, both >> 4)
    return int4.decoded(numbers, rows(panels(scale)), rows(panels(low)), group).to(dtype)
