"""What it means that a kernel implements its op, as functions over (op, kernel, chip, dtype, case).

The suite lists the registry, so a new kernel, op or chip is covered by being there.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from rng import Rng
from torch import Tensor

from afl import chip as chips
from afl import plugins
from afl.chip import Chip
from afl.errors import AmbiguousKernel, VendorRefusal
from afl.ir import op as ops
from afl.ir.kernel import Kernel, reference, rejection
from afl.ir.op import HALF, Op, Operand, Params
from afl.layout import plain, registered
from afl.types import DTYPES, HostInts, TensorType, Type, type_of


def layout_of(fmt: str) -> Any:
    """The layout that stores in a format."""
    return next(made for made in registered().values() if made.fmt == fmt)


GARBAGE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 3e4}


@attrs.frozen(eq=False)
class Call:
    """Operands and parameters of one call; `dtype` is what the floating operands were cast to."""

    op: Op
    number: int
    args: tuple[Any, ...]
    params: Params
    dtype: torch.dtype

    def types(self, fmt: Mapping[str, str] = MappingProxyType({})) -> tuple[Type | None, ...]:
        """Types of the operands when those named in `fmt` are stored so."""
        return tuple(
            None if x is None else attrs.evolve(t, fmt=fmt[o.name]) if isinstance(t := type_of(x), TensorType)
            and o.name in fmt else t for o, x in zip(self.op.operands, self.args, strict=True)
        )

    def stored(self, k: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Operands in the storage formats that the kernel asks for."""
        return tuple(
            layout_of(k.fmt[o.name]).to(x) if o.name in k.fmt and x is not None else x
            for o, x in zip(self.op.operands, args, strict=True)
        )

    def raw(self, k: Kernel, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Results of the kernel on stored operands; operands that it overwrites are overwritten."""
        out = k.fn(*args, **dict(self.params))
        return out if isinstance(out, tuple) else (out,)

    def run(self, k: Kernel, args: tuple[Any, ...] | None = None) -> tuple[Tensor, ...]:
        """Results of the kernel as plain tensors; plain operands that it overwrites are overwritten."""
        return tuple(map(plain, self.raw(k, self.stored(k, self.args if args is None else args))))

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
            out.append(Call(op, i, cast(op, args, dtype), values, dtype))
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
    return [c for c in calls(k.op, dtype) if rejection(k, c.types(k.fmt), c.params, chip) is None]


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
    want = k.op.infer(c.types(k.fmt), c.params)
    assert tuple(type_of(x) for x in c.raw(k, c.stored(k, c.copy()))) == want


def check_purity(k: Kernel, c: Call) -> None:
    """Only operands named in `inplace` change; results lie in memory of their own, or in the operand they overwrite."""
    args, before = c.stored(k, c.copy()), c.stored(k, c.copy())
    out = c.raw(k, args)
    named = {o.name: x for o, x in zip(k.op.operands, args, strict=True)}
    for o, x, old in zip(k.op.operands, args, before, strict=True):
        if isinstance(x, Tensor) and o.name not in k.inplace.values():
            assert same_bits(x, old), f"{k} changed its operand {o.name!r}"
        elif isinstance(x, HostInts):
            assert x.list == x.array.tolist() == x.tensor.tolist(), f"{k} changed its host operand {o.name!r}"
    for i, x in enumerate(out):
        if i in k.inplace:
            target = named[k.inplace[i]]
            same = x.data_ptr() == target.data_ptr() and x.stride() == target.stride()
            assert same, f"{k} result {i} is not in place"
            continue
        for name, y in named.items():
            if isinstance(y, Tensor) and y.numel() and name != k.op.view_of:
                assert storage(x) != storage(y), f"{k} result {i} shares memory with operand {name!r}"
        for j, y in enumerate(out[:i]):
            assert k.op.view_of or not x.numel() or storage(x) != storage(y), f"{k}: results {j} and {i} share memory"


def check_strides(k: Kernel, c: Call) -> None:
    """Operands whose elements lie apart give the same values.

    Two forms must work, since programs contain them: activations that are columns of a wider projection, and
    weights stored input-major.  Any other form may be refused with an exception, but never read wrongly.
    """
    want = c.run(reference(k.op))
    for how, must in ((row_strided, True), (input_major, True), (column_strided, False), (reordered, False)):
        args = tuple(
            x if not isinstance(x, Tensor) else how(x) if not must or how is FORMS.get(form(o)) else x.clone()
            for o, x in zip(k.op.operands, c.args, strict=True)
        )
        try:
            got = c.run(k, args)
        except (RuntimeError, ValueError, TypeError, VendorRefusal) as e:
            assert not must, f"{k} must take operands that are {how.__name__}: {e}"
            continue
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            close(a, b, k.op.tolerance(c.dtype), f"{k} result {i}, operands {how.__name__}")


def form(o: Operand) -> str:
    """What an operand is by its declaration: an activation has tokens or rows in front, a weight has two other dims."""
    if o.host or o.dtype is not None and not isinstance(o.dtype, str) and not o.dtype >= HALF:
        return "table"
    if o.dims[:1] in (("t",), ("r",), ("*b",)):
        return "activation"
    return "weight" if len(o.dims) == 2 else "other"


def row_strided(x: Tensor) -> Tensor:
    """x as the first columns of a wider tensor: rows are dense, and further apart than they are long."""
    if x.dim() < 2 or not x.numel():
        return x.clone()
    n = x[0].numel()
    wide = spoiled((len(x), n + 8), x)
    return wide[:, 4 : 4 + n].unflatten(1, x.shape[1:]).copy_(x)


def input_major(x: Tensor) -> Tensor:
    """A matrix stored by columns."""
    return x.T.contiguous().T


def column_strided(x: Tensor) -> Tensor:
    """x as a slice along the last dimension of a wider tensor; a vector with gaps."""
    if not x.dim():
        return x.clone()
    if x.dim() == 1:
        return torch.stack([x, spoiled(tuple(x.shape), x)], -1)[:, 0]
    return spoiled((*x.shape[:-1], x.shape[-1] + 3), x)[..., 1:-2].copy_(x)


def reordered(x: Tensor) -> Tensor:
    """x stored with its dimensions in reverse order."""
    back = tuple(reversed(range(x.dim())))
    return x.permute(back).contiguous().permute(back)


def spoiled(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory around an operand, whose content must not matter."""
    return torch.full(shape, float("nan") if like.is_floating_point() else 1, dtype=like.dtype)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {"activation": row_strided, "weight": input_major}


def _tensors(c: Call) -> list[Tensor]:
    return [x for x in c.args if isinstance(x, Tensor)]


def check_rows(k: Kernel, c: Call) -> None:
    """A row of a result is bitwise the same whatever its batch mates and unread memory hold."""
    if c.op.effect or (c.op.view_of and any(storage(x) in map(storage, _tensors(c)) for x in c.run(reference(c.op)))):
        return                                  # a view computes nothing
    for j, want in enumerate(c.run(reference(c.op))):
        for i in sorted({0, len(want) // 2, len(want) - 1}) if want.dim() and len(want) else ():
            free = _unread(c, j, i) if _coupled(c) else _other_rows(c, i, len(want))
            if any(m is not None for m in free):
                a, b = c.run(k, _filled(c, free, 0.0)), c.run(k, _filled(c, free, GARBAGE.get(c.dtype, 1e30)))
                assert same_bits(a[j][i], b[j][i]), f"{k} result {j}: row {i} depends on values that it must not read"


def _lead(c: Call) -> str | None:
    """Name of the dimension that counts rows, when the first operand and the results have it in front."""
    first = c.op.operands[0].dims[:1]
    results = c.op.results
    if not first or first[0].split("*")[-1].isdigit() or (results and any(r.dims[:1] != first for r in results)):
        return None
    return first[0]


def _coupled(c: Call) -> bool:
    """Whether other operands (tables, starts, slots) tie rows together, so that independence is not row by row."""
    lead = _lead(c)
    words = {d.split("+")[0] for o in c.op.operands for d in o.dims[:1]}
    starts = any("+" in d for o in c.op.operands for d in o.dims)
    return lead not in ("t", "r", "*b") or starts or (lead == "t" and "r" in words)


def _other_rows(c: Call, row: int, rows: int) -> list[Tensor | None]:
    """Masks of the floating elements of other rows."""
    lead = _lead(c)
    masks: list[Tensor | None] = []
    for o, x in zip(c.op.operands, c.args, strict=True):
        if isinstance(x, Tensor) and x.is_floating_point() and o.dims[:1] == (lead,) and len(x) == rows:
            masks.append(torch.ones(x.shape, dtype=torch.bool))
            masks[-1][row] = False  # type: ignore[index]
        else:
            masks.append(None)
    return masks


def _unread(c: Call, result: int, row: int) -> list[Tensor | None]:
    """Masks of the floating elements that the reference does not touch for this row: NaN there leaves its bits alone.

    Elements are probed by rows, those of caches [b s ...] by slots.
    """
    key = (c.op.name, c.number, c.dtype, result, row)
    if key not in _PROBED:
        _PROBED[key] = _probe(c, result, row)
    return _PROBED[key]


_PROBED: dict[Any, list[Tensor | None]] = {}     # every kernel of an op shares the probes of its reference


def _probe(c: Call, result: int, row: int) -> list[Tensor | None]:
    want = c.run(reference(c.op))[result][row]
    masks: list[Tensor | None] = []
    for at, (o, x) in enumerate(zip(c.op.operands, c.args, strict=True)):
        if not (isinstance(x, Tensor) and x.is_floating_point() and x.dim()):
            masks.append(None)
            continue
        def untouched(index: tuple[int, ...], at: int = at, x: Tensor = x) -> bool:
            args = list(c.args)
            args[at] = x.clone()
            args[at][index] = float("nan")
            return same_bits(c.run(reference(c.op), tuple(args))[result][row], want)

        mask = torch.zeros(x.shape, dtype=torch.bool)
        for i in range(len(x)):
            mask[i] = untouched((i,))
            if form(o) == "other" and x.dim() > 2 and not mask[i].any():
                for slot in range(x.shape[1]):
                    mask[i, slot] = untouched((i, slot))
        masks.append(mask if mask.any() else None)
    return masks


def _filled(c: Call, masks: list[Any], value: float) -> tuple[Any, ...]:
    return tuple(
        x.masked_fill(m, value) if m is not None else x.clone() if isinstance(x, Tensor) else x
        for x, m in zip(c.args, masks, strict=True)
    )


CHECKS: tuple[Callable[[Kernel, Call], None], ...] = (
    check_values, check_types, check_purity, check_strides, check_rows,
)


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
    formats = list({tuple(sorted(k.fmt.items())): k.fmt for k in op.kernels}.values())
    for c, fmt in ((c, fmt) for name in chip.dtypes for c in calls(op, DTYPES[name]) for fmt in formats):
        seen: dict[Any, Kernel] = {}
        for k in op.kernels:
            if rejection(k, c.types(fmt), c.params, chip) is None:
                rank = order.index(k.name) if k.name in order else k.priority + 0.5
                other = seen.setdefault(rank, k)
                if other is not k:
                    raise AmbiguousKernel(
                        f"{op.name} on {chip.name}: {other.name} and {k.name} both accept "
                        f"{', '.join(map(str, c.types(fmt)))}; give one a priority or set Chip.prefer"
                    )

