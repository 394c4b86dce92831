"""Elementwise and shape operators that Python's own notation stands for while tracing."""

from typing import Any

import torch
from torch import Tensor

from afl.errors import TypeRuleError
from afl.ir.op import ANY, FLOAT, T, op
from afl.ir.trace import operator
from afl.types import TensorType


@op
def add(a: T[Tensor, "*b", FLOAT], b: T[Tensor, "*b", "a"]) -> T[Tensor, "*b", "a"]:
    """a + b, elementwise, equal shapes."""
    return a + b


@op
def sub(a: T[Tensor, "*b", FLOAT], b: T[Tensor, "*b", "a"]) -> T[Tensor, "*b", "a"]:
    """a - b, elementwise, equal shapes."""
    return a - b


@op
def mul(a: T[Tensor, "*b", FLOAT], b: T[Tensor, "*b", "a"]) -> T[Tensor, "*b", "a"]:
    """a * b, elementwise, equal shapes."""
    return a * b


@op
def div(a: T[Tensor, "*b", FLOAT], b: T[Tensor, "*b", "a"]) -> T[Tensor, "*b", "a"]:
    """a / b, elementwise, equal shapes."""
    return a / b


@op
def scale(x: T[Tensor, "*b", FLOAT], *, by: float) -> T[Tensor, "*b", "x"]:
    """x times a static number, computed in float32."""
    return (x.float() * by).to(x.dtype)


@op
def cast(x: T[Tensor, "*b", ANY], *, dtype: torch.dtype) -> Tensor:
    """x in another dtype."""
    return x.to(dtype, copy=True)


@cast.rule
def _(x: TensorType, *, dtype: torch.dtype) -> TensorType:
    return TensorType(x.shape, dtype)


@op(view_of="x")
def reshape(x: T[Tensor, "*b", ANY], *, shape: tuple[int, ...]) -> Tensor:
    """x in another shape of as many elements; one size may be -1.  A view where the strides allow one."""
    return x.reshape(shape)


@reshape.rule
def _(x: TensorType, *, shape: tuple[int, ...]) -> TensorType:
    total = TensorType(x.shape, torch.uint8).nbytes
    known = 1
    for s in shape:
        known *= s if s != -1 else 1
    fits = known > 0 and total % known == 0 if -1 in shape else total == known
    if shape.count(-1) > 1 or not fits:
        raise TypeRuleError(f"cannot reshape {list(x.shape)} to {list(shape)}")
    return TensorType(tuple(total // max(known, 1) if s == -1 else s for s in shape), x.dtype)


@op(view_of="x")
def getitem(x: T[Tensor, "*b", ANY], *, key: tuple[Any, ...]) -> Tensor:
    """Static slicing: entries of `key` are (start, stop, step), "..." or an integer."""
    return x[_index(key)]


@getitem.rule
def _(x: TensorType, *, key: tuple[Any, ...]) -> TensorType:
    try:
        out = torch.empty(x.shape, dtype=x.dtype, device="meta")[_index(key)]
    except (IndexError, ValueError) as e:
        raise TypeRuleError(f"cannot slice {list(x.shape)}: {e}") from None
    return TensorType(tuple(out.shape), x.dtype)


def _index(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(slice(*k) if isinstance(k, tuple) else Ellipsis if k == "..." else k for k in key)


for _symbol, _op in (("add", add), ("sub", sub), ("mul", mul), ("div", div), ("scale", scale), ("cast", cast),
                     ("reshape", reshape), ("getitem", getitem)):
    operator(_symbol, _op)


@add.cases
@sub.cases
@mul.cases
def _pairs(rng: Any) -> Any:
    for shape in ((5,), (3, 7), (2, 3, 5)):
        yield rng.normal(*shape), rng.normal(*shape), {}


@div.cases
def _(rng: Any) -> Any:
    for shape in ((5,), (3, 7)):
        yield rng.normal(*shape), rng.normal(*shape).abs() + 1, {}


@scale.cases
def _(rng: Any) -> Any:
    yield rng.normal(3, 7), {"by": 0.5}


@cast.cases
def _(rng: Any) -> Any:
    yield rng.normal(3, 7), {"dtype": torch.bfloat16}
    yield rng.normal(3, 7), {"dtype": torch.float32}


@reshape.cases
def _(rng: Any) -> Any:
    yield rng.normal(6, 7), {"shape": (-1, 21)}


@getitem.cases
def _(rng: Any) -> Any:
    yield rng.normal(6, 7), {"key": ((1, 5, 2), 3)}
    yield rng.normal(6, 7), {"key": ("...", (None, 2, None))}
