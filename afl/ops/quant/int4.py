"""Weights of 4 bits in groups of 32 inputs: w = q * scale + low with q in 0 .. 15.

Symmetric groups are those whose `low` is -8 * scale.  Only the weight is small: activations stay as they are and every
product equals that with the decoded float32 weight.
"""

from typing import Any

import torch
from torch import Tensor

from afl.ir.op import FLOAT, INT32, UINT8, Index, T, op
from afl.ops.embed import lookup
from afl.ops.linear import score, times
from afl.ops.quant.scheme import Scheme, groups, register, spread
from afl.tree import static, struct
from afl.types import TensorType

GROUP = 32


@struct
class Int4:
    """A weight [o, i]: q uint8 [o, i] of numbers 0 to 15; scale and low [o, groups]; `group` inputs share them.

    dynamic: products round their activations too (`afl/ops/quant/dynamic.py`).
    """

    q: Tensor
    scale: Tensor
    low: Tensor
    group: int = static(GROUP)
    dynamic: bool = static(False)


@op
def linear_int4(
    x: T[Tensor, "t i", FLOAT], q: T[Tensor, "o i", UINT8], scale: T[Tensor, "o g", FLOAT],
    low: T[Tensor, "o g", "scale"], bias: T[Tensor, "o", FLOAT] | None = None, *,
    group: int, dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ (q * scale + low).T + bias in float32, rounded once to `dtype` (that of x when None)."""
    y = x.float() @ decoded(q, scale, low, group).T
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


@op
def embed_int4(
    token: T[Tensor, "t", INT32, Index("v")], q: T[Tensor, "v i", UINT8], scale: T[Tensor, "v g", FLOAT],
    low: T[Tensor, "v g", "scale"], *, group: int, dtype: torch.dtype,
) -> Tensor:
    """Rows token of q * scale + low, in `dtype`: [t, i]."""
    rows = token.long()
    return decoded(q[rows], scale[rows], low[rows], group).to(dtype)


@linear_int4.rule
def _(x: TensorType, q: TensorType, *rest: Any, group: int, dtype: torch.dtype | None) -> TensorType:
    return TensorType((x.shape[0], q.shape[0]), dtype or x.dtype)


@embed_int4.rule
def _(token: TensorType, q: TensorType, *rest: Any, group: int, dtype: torch.dtype) -> TensorType:
    return TensorType((token.shape[0], q.shape[1]), dtype)


def decoded(q: Tensor, scale: Tensor, low: Tensor, group: int) -> Tensor:
    """float32 [o, i] of plain parts.  q * scale is exact, so the sum is rounded once."""
    i = q.shape[1]
    return q.float() * spread(scale, group, i) + spread(low, group, i)


@times.register(Int4)
def _(w: Int4, x: Any, bias: Any) -> Any:
    if w.dynamic:
        from afl.ops.quant.dynamic import linear_int4_dynamic

        return linear_int4_dynamic(x, w.q, w.scale, w.low, bias)
    return linear_int4(x, w.q, w.scale, w.low, bias, group=w.group)


@score.register(Int4)
def _(w: Int4, x: Any) -> Any:
    if w.dynamic:
        from afl.ops.quant.dynamic import linear_int4_dynamic

        return linear_int4_dynamic(x, w.q, w.scale, w.low, dtype=torch.float32)
    return linear_int4(x, w.q, w.scale, w.low, group=w.group, dtype=torch.float32)


@lookup.register(Int4)
def _(w: Int4, token: Any, dtype: torch.dtype) -> Any:
    return embed_int4(token, w.q, w.scale, w.low, group=w.group, dtype=dtype)


def asymmetric(x: Tensor) -> dict[str, Tensor]:
    """low = smallest value, scale = range / 15, both rounded to float16 before the numbers are chosen."""
    g = groups(x, GROUP)
    low = g.amin(2).to(torch.float16)
    return _numbers(g, ((g.amax(2) - low.float()) / 15).to(torch.float16), low, x.shape[1])


def symmetric(x: Tensor) -> dict[str, Tensor]:
    """The value of largest magnitude becomes number 0: scale = -value / 8, so that its sign gets the longer side."""
    g = groups(x, GROUP)
    most = g.gather(2, g.abs().argmax(2, keepdim=True))[..., 0]
    scale = (most / -8).to(torch.float16)
    return _numbers(g, scale, -8 * scale, x.shape[1])


def _numbers(g: Tensor, scale: Tensor, low: Tensor, i: int) -> dict[str, Tensor]:
    q = ((g - low.float()[..., None]) / scale.float()[..., None]).nan_to_num(0, 0, 0).round().clamp(0, 15)
    return {"q": q.to(torch.uint8).flatten(1)[:, :i], "scale": scale, "low": low}


def _halves(b: Tensor) -> Tensor:
    """16 bytes of a GGUF block as its 32 numbers: the low halves first."""
    return torch.cat([b & 15, b >> 4], -1)


def from_q4_0(raw: Tensor) -> dict[str, Tensor]:
    """GGUF's Q4_0: blocks of 18 bytes, a float16 scale and 32 numbers less 8."""
    b = raw.unflatten(1, (-1, 18))
    scale = b[..., :2].contiguous().view(torch.float16)[..., 0]
    return {"q": _halves(b[..., 2:]).flatten(1), "scale": scale, "low": -8 * scale}


def from_q4_1(raw: Tensor) -> dict[str, Tensor]:
    """GGUF's Q4_1: blocks of 20 bytes, a float16 scale, a float16 lowest value and 32 numbers."""
    b = raw.unflatten(1, (-1, 20))
    pair = b[..., :4].contiguous().view(torch.float16)
    return {"q": _halves(b[..., 4:]).flatten(1), "scale": pair[..., 0], "low": pair[..., 1]}


def decode(w: Int4) -> Tensor:
    """float32 [o, i]."""
    from afl.layout import plain

    return decoded(plain(w.q), plain(w.scale), plain(w.low), w.group)


def parts(s: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of a weight's parts."""
    per = (s[0], -(-s[1] // GROUP)), torch.float16
    return {"q": (s, torch.uint8), "scale": per, "low": per}


def _wrap(q: Tensor, scale: Tensor, low: Tensor) -> Int4:
    return Int4(q, scale, low, GROUP, False)


register(Scheme(
    "int4", "4 bits, a float16 scale and lowest value per 32 inputs", asymmetric, _wrap, parts, decode,
    {"Q4_1": from_q4_1, "Q4_0": from_q4_0},
))
register(Scheme(
    "int4-sym", "4 bits around zero, a float16 scale per 32 inputs", symmetric, _wrap, parts, decode,
    {"Q4_0": from_q4_0},
))


@linear_int4.cases
def _(rng: Any) -> Any:
    for t, i, o, how in ((1, 32, 5, asymmetric), (7, 72, 35, symmetric), (9, 64, 40, asymmetric)):
        p = how(rng.normal(o, i))
        yield rng.normal(t, i), p["q"], p["scale"], p["low"], rng.normal(o), {"group": GROUP}
        yield rng.normal(t, i), p["q"], p["scale"].float(), p["low"].float(), {"group": GROUP, "dtype": torch.float32}


@embed_int4.cases
def _(rng: Any) -> Any:
    p = asymmetric(rng.normal(37, 40))
    for dtype in (torch.float32, torch.bfloat16):
        yield rng.ints(5, high=37), p["q"], p["scale"], p["low"], {"group": GROUP, "dtype": dtype}
