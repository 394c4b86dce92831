"""Ops and chips that only these tests know.  They are declared outside the registry, so conformance never sees them.

Every in-place kernel is sensitive to order, and its odd coefficients keep two wrongs from making a right: where an
operand that it overwrites can still be read, some result is wrong.
"""

import torch
from torch import Tensor

from afl.chip import Chip
from afl.errors import TypeRuleError
from afl.ir import op as ops
from afl.ir.kernel import kernel
from afl.ir.op import ANY, FLOAT, INT32, Index, T
from afl.types import HostInts, TensorType

TOY = Chip("toy", features=frozenset({"toy"}), allows_reference=True)
PLAIN = Chip("plain", allows_reference=True)
BARE = Chip("bare", features=frozenset({"toy"}), dtypes=("float16",))


def private(fn=None, **facts):
    """`@op` without the registry."""
    if fn is None:
        return lambda f: private(f, **facts)
    made = ops.op(fn, **facts)
    del ops._OPS[made.name]
    return made


@private
def toy_bump(x: T[Tensor, "*b", FLOAT], y: T[Tensor, "*b", "x"]) -> T[Tensor, "*b", "x"]:
    """1.3x + 0.7y + 0.2."""
    return 1.3 * x + 0.7 * y + 0.2


@kernel(toy_bump, needs={"toy"}, inplace={0: "x"})
def bump_kernel(x, y):
    return x.mul_(1.3).add_(y, alpha=0.7).add_(0.2)


@private
def toy_pair(a: T[Tensor, "*b", FLOAT], b: T[Tensor, "*b", "a"]) -> tuple[T[Tensor, "*b", "a"], T[Tensor, "*b", "a"]]:
    """s = 1.1a + 0.9b + 0.3, and 1.7b - s."""
    s = 1.1 * a + 0.9 * b + 0.3
    return s, 1.7 * b - s


@kernel(toy_pair, needs={"toy"}, inplace={0: "a"})
def pair_kernel(a, b):
    a.mul_(1.1).add_(b, alpha=0.9).add_(0.3)
    return a, 1.7 * b - a


@private
def toy_both(a: T[Tensor, "*b", FLOAT], b: T[Tensor, "*b", "a"]) -> tuple[T[Tensor, "*b", "a"], T[Tensor, "*b", "a"]]:
    """s = 0.6a - 1.9b + 0.4, and 1.2b + 0.8s."""
    s = 0.6 * a - 1.9 * b + 0.4
    return s, 1.2 * b + 0.8 * s


@kernel(toy_both, needs={"toy"}, inplace={0: "a", 1: "b"})
def both_kernel(a, b):
    a.mul_(0.6).add_(b, alpha=-1.9).add_(0.4)
    return a, b.mul_(1.2).add_(a, alpha=0.8)


@private
def toy_last(a: T[Tensor, "*b", FLOAT], b: T[Tensor, "*b", "a"]) -> T[Tensor, "*b", "a"]:
    """1.4a - 0.5b + 0.1."""
    return 1.4 * a - 0.5 * b + 0.1


@kernel(toy_last, needs={"toy"}, inplace={0: "b"})
def last_kernel(a, b):
    return b.mul_(-0.5).add_(a, alpha=1.4).add_(0.1)


@private
def toy_write(c: T[Tensor, "n *b", FLOAT], k: T[Tensor, "*b", "c"], *, at: int) -> T[Tensor, "n *b", "c"]:
    """c with row `at` replaced by k."""
    c = c.clone()
    c[at] = k
    return c


@kernel(toy_write, needs={"toy"}, inplace={0: "c"}, workspace=lambda c, k, *, at: k.nbytes)
def write_kernel(c, k, *, at):
    c[at] = k
    return c


@private
def toy_sum(x: T[Tensor, "*b", FLOAT], y: T[Tensor, "*b", "x"] | None) -> T[Tensor, "*b", "x"]:
    """x + 5y, or x + 1 without y.  Always fresh storage."""
    return x + 1 if y is None else x + 5 * y


@private(view_of="x")
def toy_half(x: T[Tensor, "n *b", ANY], *, second: bool) -> Tensor:
    """The first or second half of the rows."""
    n = x.shape[0] // 2
    return x[n:] if second else x[:n]


@toy_half.rule
def _(x, *, second):
    if x.shape[0] % 2:
        raise TypeRuleError("an odd number of rows")
    return TensorType((x.shape[0] // 2, *x.shape[1:]), x.dtype)


@private(view_of="x")
def toy_row(x: T[Tensor, "n *b", ANY], *, at: int) -> Tensor:
    """One row."""
    return x[at]


@toy_row.rule
def _(x, *, at):
    return TensorType(x.shape[1:], x.dtype)


@private
def toy_lookup(table: T[Tensor, "v d", FLOAT], i: T[Tensor, "t", INT32, Index("v")]) -> T[Tensor, "t d", "table"]:
    """Rows of a table."""
    return table[i.long().clamp(0, table.shape[0] - 1)]


@private
def toy_until(x: T[Tensor, "r n", FLOAT], n: T[HostInts, "r"]) -> T[Tensor, "r", "x"]:
    """Sum of the first n[r] entries of every row."""
    return torch.stack([row[:k].sum() for row, k in zip(x, n.list, strict=True)])


@private(effect="comm")
def toy_all_reduce(x: T[Tensor, "*b", FLOAT], *, axis: str) -> T[Tensor, "*b", "x"]:
    """Sum over the ranks of an axis; here there is one."""
    return x.clone()


@private
def toy_fused(x: T[Tensor, "*b", FLOAT], y: T[Tensor, "*b", "x"], *, by: float) -> T[Tensor, "*b", "x"]:
    """(x + y) times by."""
    return (x + y) * by


def t32(*shape):
    return TensorType(shape, torch.float32)
