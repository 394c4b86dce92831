"""Named collectives, written in the model's text.  On a mesh axis of size 1 they are removed from the program."""

from typing import Any

from torch import Tensor

from afl.ir.op import FLOAT, T, op


@op(effect="comm")
def all_reduce(x: T[Tensor, "*b", FLOAT], *, axis: str) -> T[Tensor, "*b", "x"]:
    """The sum of x over the ranks of a mesh axis.  The reference is that of an axis of size 1: x itself."""
    return x.clone()


@all_reduce.cases
def _(rng: Any) -> Any:
    yield rng.normal(3, 5), {"axis": "tp"}
