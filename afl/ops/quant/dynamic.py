"""Products in integers: weights of 8 or 4 bits, activations rounded to 8 bits as they come, per row and 32 inputs.

Each group's activations become q * scale with scale = amax / 127 and q in -127 .. 127; a group's product is an exact
sum of integers times both scales.  A row's numbers depend on that row alone.
"""

from typing import Any

import torch
from torch import Tensor

from afl.ir.op import FLOAT, INT8, UINT8, T, op
from afl.ops.quant import int4, int8
from afl.ops.quant.int4 import Int4
from afl.ops.quant.int8 import Int8
from afl.ops.quant.scheme import Scheme, register
from afl.types import TensorType

GROUP = 32


@op
def linear_int8_dynamic(
    x: T[Tensor, "t i", FLOAT], q: T[Tensor, "o i", INT8], scale: T[Tensor, "o g", FLOAT],
    bias: T[Tensor, "o", FLOAT] | None = None, *, dtype: torch.dtype | None = None,
) -> Tensor:
    """rounded(x) @ (q * scale).T + bias in float32, rounded once to `dtype` (that of x when None)."""
    number, step, _ = rounded(x.float())
    y = _product(number, step, _grouped(q), scale)
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


@op
def linear_int4_dynamic(
    x: T[Tensor, "t i", FLOAT], q: T[Tensor, "o i", UINT8], scale: T[Tensor, "o g", FLOAT],
    low: T[Tensor, "o g", "scale"], bias: T[Tensor, "o", FLOAT] | None = None, *, dtype: torch.dtype | None = None,
) -> Tensor:
    """rounded(x) @ (q * scale + low).T + bias in float32, rounded once to `dtype` (that of x when None)."""
    number, step, total = rounded(x.float())
    y = _product(number, step, _grouped(q), scale) + (step * total) @ low.float().T
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


def rounded(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers float32 [t, g, 32], scales [t, g], sums of the numbers [t, g]) of x [t, i].

    A group with a value that is not finite has NaN for a scale.
    """
    g = _grouped(x)
    most = g.abs().amax(2)
    number = (g * torch.where(most > 0, 127 / most, 0)[..., None]).round().nan_to_num(0, 0, 0)
    step = torch.where(most.isfinite(), most / 127, torch.nan)
    return number, step, number.sum(2)


def _grouped(x: Tensor) -> Tensor:
    """[n, i] as float32 [n, g, 32], filled up with zeros."""
    n, i = x.shape
    count = -(-i // GROUP)
    return torch.nn.functional.pad(x.float(), (0, count * GROUP - i)).unflatten(1, (count, GROUP))


def _product(number: Tensor, step: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """[t, o]; the sums inside a group are whole numbers below 2**24, exact in float32."""
    return sum(
        ((number[:, k] @ q[:, k].T) * (step[:, k, None] * scale[:, k].float()) for k in range(q.shape[1])),
        torch.zeros(len(number), len(q)),
    )


@linear_int8_dynamic.rule
def _(x: TensorType, q: TensorType, *rest: Any, dtype: torch.dtype | None) -> TensorType:
    return TensorType((x.shape[0], q.shape[0]), dtype or x.dtype)


@linear_int4_dynamic.rule
def _(x: TensorType, q: TensorType, *rest: Any, dtype: torch.dtype | None) -> TensorType:
    return TensorType((x.shape[0], q.shape[0]), dtype or x.dtype)


register(Scheme(
    "int8-dynamic", "8 bits, a float16 scale per 32 inputs; activations rounded to 8 bits per 32",
    int8.encode, lambda q, scale: Int8(q, scale, GROUP, True),
    lambda s: {"q": (s, torch.int8), "scale": ((s[0], -(-s[1] // GROUP)), torch.float16)}, int8.decode,
    {"Q8_0": int8.from_q8_0}, form="-quad",
))
register(Scheme(
    "int4-dynamic", "4 bits, a float16 scale and lowest value per 32 inputs; activations rounded to 8 bits per 32",
    int4.asymmetric, lambda q, scale, low: Int4(q, scale, low, GROUP, True), int4.parts, int4.decode,
    {"Q4_1": int4.from_q4_1, "Q4_0": int4.from_q4_0}, form="-quad",
))


@linear_int8_dynamic.cases
def _(rng: Any) -> Any:
    for t, i, o in ((1, 32, 5), (7, 72, 35), (9, 96, 40)):
        parts = int8.encode(rng.normal(o, i))
        yield rng.normal(t, i), parts["q"], parts["scale"], rng.normal(o), {}
        yield rng.normal(t, i), parts["q"], parts["scale"], {"dtype": torch.float32}


@linear_int4_dynamic.cases
def _(rng: Any) -> Any:
    for t, i, o, how in ((1, 32, 5, int4.asymmetric), (7, 72, 35, int4.symmetric), (9, 96, 40, int4.asymmetric)):
        p = how(rng.normal(o, i))
        yield rng.normal(t, i), p["q"], p["scale"], p["low"], rng.normal(o), {}
        yield rng.normal(t, i), p["q"], p["scale"], p["low"], {"dtype": torch.float32}
