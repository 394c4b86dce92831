"""Declarations and blocks that decoder models share."""

from typing import Any

from afl.models.spec import ParamSpec
from afl.ops.linear import Dense
from afl.tree import evolve, map


def gamma(d: int, source: str) -> ParamSpec:
    """The scale of a norm."""
    return ParamSpec((d,), "norm.gamma", (source + ".weight",), (None,), init="ones")


def dense(
    i: int, parts: dict[str, int], at: str, axes: tuple[str | None, ...] = (None, None), bias: bool = False
) -> Dense:
    """A linear weight [sum(parts), i] made of the checkpoint's `at` + name for each part, in order."""
    sizes = tuple(parts.values())
    names = tuple(at.replace("*", n) + "." for n in parts)
    cut = sizes if len(sizes) > 1 else ()
    w = ParamSpec((sum(sizes), i), "linear.weight", tuple(n + "weight" for n in names), axes, 0, cut)
    b = ParamSpec((sum(sizes),), "linear.bias", tuple(n + "bias" for n in names), axes[:1], 0, cut, init="zeros")
    return Dense(w, b if bias else None)  # type: ignore[arg-type]


def repeat(layer: Any, n: int) -> tuple[Any, ...]:
    """`layer` n times with "{i}" in its source names replaced by the layer's number."""
    def numbered(i: int) -> Any:
        return map(lambda s: evolve(s, source=tuple(x.replace("{i}", str(i)) for x in s.source)), layer)

    return tuple(numbered(i) for i in range(n))
