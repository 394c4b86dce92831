"""Weights of 8 bits, symmetric: w = q * scale with q in -127 .. 127; a scale per group of 32 inputs, or per output.

Only the weight is small: activations stay as they are and every product equals that with the decoded float32 weight.
"""

from typing import Any

import torch
from torch import Tensor

from afl.ir.op import FLOAT, INT8, INT32, Index, T, op
from afl.ops.embed import lookup
from afl.ops.linear import score, times
from afl.ops.quant.scheme import Scheme, groups, register, spread
from afl.tree import static, struct
from afl.types import TensorType

GROUP = 32


@struct
class Int8:
    """A weight [o, i]: q int8 [o, i], scale [o, groups]; `group` inputs share a scale.

    dynamic: products round their activations too (`afl/ops/quant/dynamic.py`).
    """

    q: Tensor
    scale: Tensor
    group: int = static(GROUP)
    dynamic: bool = static(False)


@op
def linear_int8(
    x: T[Tensor, "t i", FLOAT], q: T[Tensor, "o i", INT8], scale: T[Tensor, "o g", FLOAT],
    bias: T[Tensor, "o", FLOAT] | None = None, *, group: int, dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ (q * scale).T + bias in float32, rounded once to `dtype` (that of x when None)."""
    y = x.float() @ decoded(q, scale, group).T
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


@op
def embed_int8(
    token: T[Tensor, "t", INT32, Index("v")], q: T[Tensor, "v i", INT8], scale: T[Tensor, "v g", FLOAT], *,
    group: int, dtype: torch.dtype,
) -> Tensor:
    """Rows token of q * scale, in `dtype`: [t, i]."""
    rows = token.long()
    return decoded(q[rows], scale[rows], group).to(dtype)


@linear_int8.rule
def _(x: TensorType, q: TensorType, *rest: Any, group: int, dtype: torch.dtype | None) -> TensorType:
    return TensorType((x.shape[0], q.shape[0]), dtype or x.dtype)


@embed_int8.rule
def _(token: TensorType, q: TensorType, scale: TensorType, *, group: int, dtype: torch.dtype) -> TensorType:
    return TensorType((token.shape[0], q.shape[1]), dtype)


def decoded(q: Tensor, scale: Tensor, group: int) -> Tensor:
    """float32 [o, i] of plain parts."""
    return q.float() * spread(scale, group, q.shape[1])


@times.register(Int8)
def _(w: Int8, x: Any, bias: Any) -> Any:
    if w.dynamic:
        from afl.ops.quant.dynamic import linear_int8_dynamic

        return linear_int8_dynamic(x, w.q, w.scale, bias)
    return linear_int8(x, w.q, w.scale, bias, group=w.group)


@score.register(Int8)
def _(w: Int8, x: Any) -> Any:
    if w.dynamic:
        from afl.ops.quant.dynamic import linear_int8_dynamic

        return linear_int8_dynamic(x, w.q, w.scale, dtype=torch.float32)
    return linear_int8(x, w.q, w.scale, group=w.group, dtype=torch.float32)


@lookup.register(Int8)
def _(w: Int8, token: Any, dtype: torch.dtype) -> Any:
    return embed_int8(token, w.q, w.scale, group=w.group, dtype=dtype)


def encode(x: Tensor, size: int = GROUP, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Nearest numbers for scales of amax / 127, rounded to their own dtype first.  size 0: one group a row."""
    g = groups(x, size or x.shape[1])
    scale = (g.abs().amax(2) / 127).clamp(max=torch.finfo(dtype).max).to(dtype)
    q = (g / scale.float()[..., None]).nan_to_num(0, 0, 0).round().clamp(-127, 127)
    return {"q": q.to(torch.int8).flatten(1)[:, : x.shape[1]], "scale": scale}


def from_q8_0(raw: Tensor) -> dict[str, Tensor]:
    """GGUF's Q8_0: blocks of 34 bytes, a float16 scale and 32 numbers."""
    b = raw.unflatten(1, (-1, 34))
    return {"q": b[..., 2:].view(torch.int8).flatten(1), "scale": b[..., :2].contiguous().view(torch.float16)[..., 0]}


def decode(w: Int8) -> Tensor:
    """float32 [o, i]."""
    from afl.layout import plain

    return decoded(plain(w.q), plain(w.scale), w.group)


register(Scheme(
    "int8", "8 bits, a float16 scale per 32 inputs", encode, lambda q, scale: Int8(q, scale, GROUP, False),
    lambda s: {"q": (s, torch.int8), "scale": ((s[0], -(-s[1] // GROUP)), torch.float16)}, decode, {"Q8_0": from_q8_0},
))


def _channel(q: Tensor, scale: Tensor) -> Int8:
    return Int8(q, scale, q.shape[1], False)


register(Scheme(
    "int8-channel", "8 bits, a float32 scale per output", lambda x: encode(x, 0, torch.float32), _channel,
    lambda s: {"q": (s, torch.int8), "scale": ((s[0], 1), torch.float32)}, decode,
))


@linear_int8.cases
def _(rng: Any) -> Any:
    for t, i, o, size in ((1, 32, 5, 32), (7, 72, 35, 32), (9, 11, 40, 0)):
        parts = encode(rng.normal(o, i), size)
        yield rng.normal(t, i), parts["q"], parts["scale"], rng.normal(o), {"group": size or i}
        yield rng.normal(t, i), parts["q"], parts["scale"].float(), {"group": size or i, "dtype": torch.float32}


@embed_int8.cases
def _(rng: Any) -> Any:
    parts = encode(rng.normal(37, 40))
    for dtype in (torch.float32, torch.bfloat16):
        yield rng.ints(5, high=37), parts["q"], parts["scale"], {"group": GROUP, "dtype": dtype}
