"""Matrix products with weights.  `project` dispatches on the weight's struct, so that a model never names a scheme."""

from functools import singledispatch
from typing import Any

from torch import Tensor

from afl.ir.op import FLOAT, T, op
from afl.tree import struct


@op
def linear(
    x: T[Tensor, "t i", FLOAT], w: T[Tensor, "o i", FLOAT], bias: T[Tensor, "o", FLOAT] | None = None
) -> T[Tensor, "t o", "x"]:
    """x @ w.T + bias, accumulated in float32, rounded once to the dtype of x."""
    y = x.float() @ w.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


@op
def logits(x: T[Tensor, "r d", FLOAT], w: T[Tensor, "v d", FLOAT]) -> Tensor:
    """x @ w.T in float32, not rounded: f32[r, v]."""
    return x.float() @ w.float().T


@logits.rule
def _(x: Any, w: Any) -> Any:
    import torch

    from afl.types import TensorType

    return TensorType((x.shape[0], w.shape[0]), torch.float32)


@struct
class Dense:
    """A weight [o, i], plain or in the struct of a scheme, with an optional bias [o]."""

    w: Tensor
    bias: Tensor | None = None


@singledispatch
def times(w: Any, x: Any, bias: Any) -> Any:
    """x [t, i] @ w.T + bias for a weight in any form: [t, o].  Schemes register here and with `score` and `lookup`."""
    return linear(x, w, bias)


@singledispatch
def score(w: Any, x: Any) -> Any:
    """Logits f32[r, v] of hidden states x [r, d] for an output head in any form."""
    return logits(x, w)


def project(x: Any, weight: Dense) -> Any:
    """x [t, i] through a linear layer: [t, o]."""
    return times(weight.w, x, weight.bias)


@linear.cases
def _(rng: Any) -> Any:
    for t, i, o in ((1, 8, 5), (7, 16, 11)):
        yield rng.normal(t, i), rng.normal(o, i) / 4, {}
        yield rng.normal(t, i), rng.normal(o, i) / 4, rng.normal(o), {}


@logits.cases
def _(rng: Any) -> Any:
    yield rng.normal(3, 8), rng.normal(13, 8), {}
