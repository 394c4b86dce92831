"""Root-mean-square norms.  Source: Zhang & Sennrich 2019 (arXiv:1910.07467), eq. 4; computed in float32."""

from typing import Any

import torch
from torch import Tensor

from afl.ir.op import FLOAT, T, op


@op
def rms_norm(x: T[Tensor, "*b d", FLOAT], gamma: T[Tensor, "d", FLOAT], *, eps: float) -> T[Tensor, "*b d", "x"]:
    """gamma * x / sqrt(mean(x^2) + eps) over the last dimension."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * gamma.float()).to(x.dtype)


@op
def add_rms_norm(
    x: T[Tensor, "*b d", FLOAT], residual: T[Tensor, "*b d", "x"], gamma: T[Tensor, "d", FLOAT], *, eps: float
) -> tuple[T[Tensor, "*b d", "x"], T[Tensor, "*b d", "x"]]:
    """Residual add, then norm.  Returns (normed, new residual); the sum is normed before it is rounded."""
    s = x.float() + residual.float()
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    return (y * gamma.float()).to(x.dtype), s.to(x.dtype)


@rms_norm.cases
def _(rng: Any) -> Any:
    for shape in ((1, 8), (5, 24), (3, 2, 16), (5, 37)):
        yield rng.normal(*shape), rng.normal(shape[-1]), {"eps": 1e-5}


@add_rms_norm.cases
def _(rng: Any) -> Any:
    for shape in ((1, 8), (5, 24), (5, 37)):
        yield rng.normal(*shape), rng.normal(*shape), rng.normal(shape[-1]), {"eps": 1e-5}
