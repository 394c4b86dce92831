"""Rotary position embedding.  Source: Su et al. 2021 (arXiv:2104.09864), eq. 34."""

import math
from typing import Any

import torch
from torch import Tensor

from afl.errors import TypeRuleError
from afl.ir.op import FLOAT, FLOAT32, INT32, T, op
from afl.types import TensorType


@op
def rope_angles(position: T[Tensor, "t", INT32], *, inv_freq: tuple[float, ...], scale: float = 1.0) -> tuple[
    T[Tensor, "t p", FLOAT32], T[Tensor, "t p", FLOAT32]
]:
    """(cos, sin) f32 [t, p] of position * inv_freq, both multiplied by `scale`.

    p = len(inv_freq), half the rotated width.  Angles are formed in float32: 16-bit angles are off by whole turns
    beyond a few hundred tokens.
    """
    a = position.float()[:, None] * torch.tensor(inv_freq, dtype=torch.float32, device=position.device)
    return a.cos() * scale, a.sin() * scale


@rope_angles.rule
def _(position: TensorType, *, inv_freq: tuple[float, ...], scale: float) -> tuple[TensorType, ...]:
    t = TensorType((position.shape[0], len(inv_freq)), torch.float32)
    return t, t


@op
def rope(
    x: T[Tensor, "t h e", FLOAT], cos: T[Tensor, "t p", FLOAT32], sin: T[Tensor, "t p", FLOAT32], *,
    interleaved: bool = False,
) -> T[Tensor, "t h e", "x"]:
    """Rotate the first 2p channels of each head by per-token angles; remaining channels pass through.

    interleaved pairs channels (0,1), (2,3), ...; otherwise channel i with i+p.  Computed in float32.
    """
    p = cos.shape[-1]
    a, rest = x[..., : 2 * p].float(), x[..., 2 * p :]
    u, w = (a[..., 0::2], a[..., 1::2]) if interleaved else (a[..., :p], a[..., p:])
    c, s = cos[:, None], sin[:, None]
    y = (u * c - w * s, u * s + w * c)
    z = torch.stack(y, -1).flatten(-2) if interleaved else torch.cat(y, -1)
    return torch.cat([z.to(x.dtype), rest], -1)


@rope.rule
def _(x: TensorType, cos: TensorType, sin: TensorType, *, interleaved: bool) -> TensorType:
    if 2 * cos.shape[1] > x.shape[2]:
        p, e = cos.shape[1], x.shape[2]
        raise TypeRuleError(f"angles of width {p} rotate {2 * p} channels, a head has {e}")
    return x


@op(view_of="x")
def split_qkv(x: T[Tensor, "t n", FLOAT], *, h: int, k: int, e: int) -> tuple[
    T[Tensor, "t h e", "x"], T[Tensor, "t k e", "x"], T[Tensor, "t k e", "x"]
]:
    """Cut [t, (h+2k)*e] into q [t h e], k [t k e] and v [t k e]; views."""
    return tuple(p.unflatten(-1, (-1, e)) for p in x.split([h * e, k * e, k * e], dim=-1))  # type: ignore[return-value]


@split_qkv.rule
def _(x: TensorType, *, h: int, k: int, e: int) -> tuple[TensorType, ...]:
    if (h + 2 * k) * e != x.shape[1]:
        raise TypeRuleError(f"{h} + 2 * {k} heads of {e} channels are {(h + 2 * k) * e}, the operand has {x.shape[1]}")
    return tuple(TensorType((x.shape[0], n, e), x.dtype) for n in (h, k, k))


@rope_angles.cases
def _(rng: Any) -> Any:
    yield torch.tensor([0, 1, 5, 900], dtype=torch.int32), {"inv_freq": (1.0, 0.1, 0.01), "scale": 1.0}
    yield torch.tensor([3], dtype=torch.int32), {"inv_freq": (1.0, 0.5), "scale": 1.1}


@rope.cases
def _(rng: Any) -> Any:
    for t, h, e, p in ((1, 1, 8, 4), (5, 3, 16, 4), (7, 2, 32, 16), (3, 2, 64, 32), (2, 1, 128, 64)):
        a = rng.normal(t, p) * math.pi
        for interleaved in (False, True):
            yield rng.normal(t, h, e), a.cos(), a.sin(), {"interleaved": interleaved}


@split_qkv.cases
def _(rng: Any) -> Any:
    yield rng.normal(5, 30), {"h": 3, "k": 1, "e": 6}
