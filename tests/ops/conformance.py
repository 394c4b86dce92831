"""What it means that a kernel implements its op, as functions over (op, kernel, chip, dtype, case).

The suite lists the registry, so a new kernel, op or chip is covered by being there.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from rng import Rng
from torch import Tensor

from afl import chip as chips
from afl import plugins
from afl.chip import Chip
from afl.errors import AmbiguousKernel, TypeRuleError
from afl.ir import op as ops
from afl.ir.kernel import Kernel, reference, rejection
from afl.ir.op import Op, Params
from afl.types import DTYPES, HostInts, TensorType, Type, type_of

GARBAGE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 3e4}


@attrs.frozen
class Call:
    """Operands and parameters of one call; `dtype` is what the floating operands were cast to."""

    op: Op
    args: tuple[Any, ...]
    params: Params
    dtype: torch.dtype

    @property
    def types(self) -> tuple[Type | None, ...]:
        return tuple(None if x is None else type_of(x) for x in self.args)

    def run(self, k: Kernel, args: tuple[Any, ...] | None = None) -> tuple[Tensor, ...]:
        """Results of the kernel; operands that it overwrites are overwritten."""
        out = k.fn(*(self.args if args is None else args), **dict(self.params))
        return out if isinstance(out, tuple) else (out,)

    def copy(self) -> tuple[Any, ...]:
        return tuple(x.clone() if isinstance(x, Tensor) else x for x in self.args)


@attrs.frozen
class Combination:
    """One row of the table."""

    kernel: Kernel
    chip: Chip
    dtype: torch.dtype

    @property
    def op(self) -> Op:
        return self.kernel.op

    def __str__(self) -> str:
        return f"{self.op.name}-{self.kernel.name}-{self.chip.name}-{str(self.dtype).removeprefix('torch.')}"


def all_ops() -> list[Op]:
    plugins.load_ops()
    return list(ops.registered().values())


def all_chips() -> list[Chip]:
    plugins.load_ops()
    return list(chips.registered().values())


def calls(op: Op, dtype: torch.dtype) -> list[Call]:
    """The op's cases with floating operands in `dtype`, as far as their declared classes allow."""
    out = []
    for i, case in enumerate(op.examples(Rng(1))):
        *given, params = case
        args, values = op.bind(tuple(given), params)
        if i == 0 or any(isinstance(x, Tensor) and x.is_floating_point() for x in args) or dtype == torch.float32:
            out.append(Call(op, cast(op, args, dtype), values, dtype))
    return out


def cast(op: Op, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Floating operands in `dtype` where the declaration admits it; "same as x" follows x."""
    now: dict[str, torch.dtype] = {}
    out = []
    for o, x in zip(op.operands, args, strict=True):
        if isinstance(x, Tensor) and x.is_floating_point():
            if isinstance(o.dtype, str):
                x = x.to(now[o.dtype])
            elif o.dtype is None or dtype in o.dtype:
                x = x.to(dtype)
        if isinstance(x, Tensor):
            now[o.name] = x.dtype
        out.append(x)
    return tuple(out)


def combinations(op: Op | None = None) -> list[Combination]:
    """Every (kernel, chip whose features fit, dtype of that chip) that accepts at least one case; references too."""
    out = []
    for o in [op] if op else all_ops():
        for chip in all_chips():
            for name in chip.dtypes:
                dtype = DTYPES[name]
                for k in [*o.kernels, *([reference(o)] if chip.allows_reference else [])]:
                    if accepted(k, chip, dtype):
                        out.append(Combination(k, chip, dtype))
    return out


def accepted(k: Kernel, chip: Chip, dtype: torch.dtype) -> list[Call]:
    """The cases that the kernel takes on this chip in this dtype."""
    return [c for c in calls(k.op, dtype) if rejection(k, c.types, c.params, chip) is None]


# ---- the claims ----------------------------------------------------------------------------------------------------


def close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Equal within `tolerance` relative to max(1, |want|); integers and infinities exactly."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {type_of(got)}, want {type_of(want)}"
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{what}: integers differ at {(got != want).nonzero()[:4].tolist()}"
        return
    a, b = got.float(), want.float()
    same = (a == b) | (a.isnan() & b.isnan())
    bad = ~same & ~((a - b).abs() <= tolerance * b.abs().clamp(min=1))
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(bad.sum())} of {bad.numel()} differ, first at {at}: {a[at]} != {b[at]}")


def bits(x: Tensor) -> bytes:
    return x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.dim() else bits(x[None])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality; NaN equals NaN of the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def check_values(k: Kernel, c: Call) -> None:
    """Results equal the reference's within the op's tolerance."""
    want = c.run(reference(k.op))
    got = c.run(k, c.copy())
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        close(a, b, k.op.tolerance(c.dtype), f"{k} result {i}")


def check_types(k: Kernel, c: Call) -> None:
    """Result types are those of the rule."""
    want = k.op.infer(c.types, c.params)
    assert tuple(type_of(x) for x in c.run(k, c.copy())) == want


def check_purity(k: Kernel, c: Call) -> None:
    """Only operands named in `inplace` change; results lie in memory of their own, or in the operand they overwrite."""
    args = c.copy()
    out = c.run(k, args)
    named = {o.name: x for o, x in zip(k.op.operands, args, strict=True)}
    for o, x, old in zip(k.op.operands, args, c.args, strict=True):
        if isinstance(x, Tensor) and o.name not in k.inplace.values():
            assert same_bits(x, old), f"{k} changed its operand {o.name!r}"
        elif isinstance(x, HostInts):
            assert x.list == x.array.tolist() == x.tensor.tolist(), f"{k} changed its host operand {o.name!r}"
    for i, x in enumerate(out):
        if i in k.inplace:
            target = named[k.inplace[i]]
            assert x.data_ptr() == target.data_ptr() and x.stride() == target.stride(), f"{k} result {i} is not in place"
            continue
        for name, y in named.items():
            if isinstance(y, Tensor) and y.numel() and name != k.op.view_of:
                assert storage(x) != storage(y), f"{k} result {i} shares memory with operand {name!r}"
        for j, y in enumerate(out[:i]):
            assert k.op.view_of or not x.numel() or storage(x) != storage(y), f"{k}: results {j} and {i} share memory"


def check_strides(k: Kernel, c: Call) -> None:
    """Operands that are parts of wider tensors, or stored in another order, give the same values."""
    want = c.run(reference(k.op))
    for how in (widened, reordered):
        args = tuple(how(x) if isinstance(x, Tensor) else x for x in c.args)
        try:
            got = c.run(k, args)
        except RuntimeError as e:
            raise AssertionError(f"{k} cannot take operands that are {how.__name__}: {e}") from None
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            close(a, b, k.op.tolerance(c.dtype), f"{k} result {i}, operands {how.__name__}")


def widened(x: Tensor) -> Tensor:
    """x as a slice of a tensor with more columns, which hold garbage."""
    if not x.dim():
        return x
    fill = float("nan") if x.is_floating_point() else 1
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), fill, dtype=x.dtype)
    part = wide[..., 1:-2]
    return part.copy_(x)


def reordered(x: Tensor) -> Tensor:
    """x stored with its dimensions in reverse order; a vector as a column."""
    if x.dim() == 1:
        return torch.stack([x, torch.zeros_like(x)], -1)[:, 0]
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def check_rows(k: Kernel, c: Call) -> None:
    """A row of the result is bitwise the same whatever its batch mates and unread memory hold."""
    for i, zeros, filled in row_pairs(c):
        a, b = c.run(k, zeros), c.run(k, filled)
        for j, (x, y) in enumerate(zip(a, b, strict=True)):
            if x.dim() and x.shape[0] > i:
                assert same_bits(x[i], y[i]), f"{k} result {j}: row {i} depends on values that it must not read"


def row_pairs(c: Call) -> Iterator[tuple[int, tuple[Any, ...], tuple[Any, ...]]]:
    """(row, operands with zeros, operands with garbage) where the row must not see the difference."""
    if c.op.view_of or c.op.effect:
        return
    rows = c.run(reference(c.op))[0].shape[:1]
    if not rows:
        return
    coupled = _coupled(c)
    for i in sorted({0, rows[0] // 2, rows[0] - 1}):
        free = _unread(c, i) if coupled else _other_rows(c, i, rows[0])
        if free is None:
            return
        yield i, _filled(c, free, 0.0), _filled(c, free, GARBAGE.get(c.dtype, 1e30))


def _lead(c: Call) -> str | None:
    """Name of the dimension that counts rows, when the first operand and the results have it in front."""
    first = c.op.operands[0].dims[:1]
    results = c.op.results
    if not first or first[0].split("*")[-1].isdigit() or (results and any(r.dims[:1] != first for r in results)):
        return None
    return first[0]


def _coupled(c: Call) -> bool:
    """Whether rows are tied together by other operands (tables, starts), so that independence is not row by row."""
    lead = _lead(c)
    if lead is None:
        return True
    return any(
        d != lead and d.strip("+-0123456789*") == lead or (lead == "t" and d.startswith("r"))
        for o in c.op.operands for d in o.dims
    )


def _other_rows(c: Call, row: int, rows: int) -> list[Any] | None:
    """Masks of the floating elements of other rows."""
    lead = _lead(c)
    masks: list[Any] = []
    for o, x in zip(c.op.operands, c.args, strict=True):
        if isinstance(x, Tensor) and x.is_floating_point() and o.dims[:1] == (lead,) and x.shape[0] == rows:
            m = torch.ones(x.shape, dtype=torch.bool)
            m[row] = False
            masks.append(m)
        else:
            masks.append(None)
    return masks if any(m is not None for m in masks) else None


def _unread(c: Call, row: int) -> list[Any] | None:
    """Masks of the floating elements on which the reference's row does not depend: its gradient there is zero."""
    args = tuple(
        x.clone().float().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in c.args
    )
    out = [x for x in c.run(reference(c.op), args) if x.is_floating_point() and x.requires_grad and x.shape[0] > row]
    if not out:
        return None
    weights = Rng(2)
    total = torch.stack([(x[row] * weights.normal(*x[row].shape)).sum() for x in out]).sum()
    inputs = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    grads = iter(torch.autograd.grad(total, inputs, allow_unused=True))
    masks: list[Any] = []
    for x in args:
        if isinstance(x, Tensor) and x.requires_grad:
            g = next(grads)
            masks.append(torch.ones(x.shape, dtype=torch.bool) if g is None else g == 0)
        else:
            masks.append(None)
    return masks


def _filled(c: Call, masks: list[Any], value: float) -> tuple[Any, ...]:
    return tuple(
        x.masked_fill(m, value) if m is not None else x.clone() if isinstance(x, Tensor) else x
        for x, m in zip(c.args, masks, strict=True)
    )


CHECKS: tuple[Callable[[Kernel, Call], None], ...] = (check_values, check_types, check_purity, check_strides, check_rows)


def conforms(it: Combination) -> None:
    """All claims for all cases that the combination accepts."""
    for c in accepted(it.kernel, it.chip, it.dtype):
        for check in CHECKS:
            if check is check_rows and not it.kernel.invariant:
                continue
            check(it.kernel, c)


def ambiguous(op: Op, chip: Chip) -> None:
    """Raise AmbiguousKernel if two kernels accept a case and neither priority nor `chip.prefer` orders them."""
    order = chip.prefer.get(op.name, ())
    for name in chip.dtypes:
        for c in calls(op, DTYPES[name]):
            seen: dict[Any, Kernel] = {}
            for k in op.kernels:
                if rejection(k, c.types, c.params, chip) is None:
                    rank = order.index(k.name) if k.name in order else k.priority + 0.5
                    other = seen.setdefault(rank, k)
                    if other is not k:
                        raise AmbiguousKernel(
                            f"{op.name} on {chip.name}: {other.name} and {k.name} both accept "
                            f"{', '.join(map(str, c.types))}; give one a priority or set Chip.prefer"
                        )


__all__ = ["Call", "Combination", "TensorType", "TypeRuleError", "all_chips", "all_ops", "ambiguous", "combinations", "conforms"]
