"""`@kernel` registers an implementation of an op with what it needs; `choose` picks one for a chip, `explain` says why.

A kernel has the op's exact signature and decides nothing by chip name: its requirements are declared.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from afl.chip import Chip
from afl.errors import AflError, NoKernel
from afl.ir.op import Op, Params
from afl.layout import plain
from afl.types import TensorType, Type


@attrs.frozen
class Update:
    """What a captured vendor call with host operands is given anew at every replay.

    op: the vendor operator, "npu::name".  keys: its arguments that change.
    values: (operands, **params) -> {key: list or host tensor} of all keys; operands are HostInts, and types or tensors.
    The kernel makes its arguments by the same function, and their sizes depend on types alone.
    """

    op: str
    keys: tuple[str, ...]
    values: Callable[..., Mapping[str, Any]]


@attrs.frozen(eq=False)
class Kernel:
    """An implementation of an op.

    needs: features that the chip must have.      dtypes: accepted dtypes of the tensor operands of float kind.
    when: predicate over (operand types, **params); must be monotone in every dimension, or `widens` is False.
    inplace: result index -> operand name that it overwrites and returns.
    host: operands the vendor op takes as host lists, and update: how a captured call is given them anew.
    fmt: operand name -> required storage format ("nd" if absent).
    workspace: (operand types, **params) -> temporary bytes.  invariant: a row is independent of its batch mates.
    """

    op: Op
    name: str
    fn: Callable[..., Any]
    needs: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] | None = None
    when: Callable[..., bool] | None = None
    inplace: Mapping[int, str] = attrs.field(factory=dict)
    host: tuple[str, ...] = ()
    update: Update | None = None
    capturable: bool = True
    widens: bool = True
    invariant: bool = True
    workspace: Callable[..., int] | None = None
    priority: int = 0
    fmt: Mapping[str, str] = attrs.field(factory=dict)

    def __repr__(self) -> str:
        return f"<kernel {self.op.name}/{self.name}>"


def kernel(target: Op, *, needs: set[str] | frozenset[str] = frozenset(), name: str | None = None, **facts: Any) -> Any:
    """Register the decorated function as a kernel of `target`.  Facts are the fields of `Kernel`."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        made = Kernel(target, name or fn.__name__, fn, frozenset(needs), **facts)
        _validate(made)
        target.kernels.append(made)
        _MEMO.clear()
        return fn

    return wrap


def _validate(k: Kernel) -> None:
    want = [o.name for o in k.op.operands] + list(k.op.params)
    got = list(inspect.signature(k.fn).parameters)
    where = f"kernel {k.name!r} of {k.op.name}"
    if got != want:
        raise AflError(f"{where} has parameters {got}, the op has {want}; a kernel has the op's exact signature")
    names = {o.name for o in k.op.operands}
    for what, used in (("inplace", set(k.inplace.values())), ("host", set(k.host)), ("fmt", set(k.fmt))):
        if used - names:
            raise AflError(f"{where}: {what} names operands that the op lacks: {sorted(used - names)}")
    if k.update is not None and not k.host:
        raise AflError(f"{where} declares update= and no host operands that it would renew; list them in host=")
    if any(other.name == k.name for other in k.op.kernels):
        raise AflError(f"{where} is registered twice")


@attrs.frozen
class Choice:
    """The outcome of choosing: the kernel, and why each of the others was not taken."""

    op: str
    types: tuple[Type | None, ...]
    chip: str
    chosen: Kernel | None
    rejected: tuple[tuple[str, str], ...]  # (kernel name, reason)
    passed: tuple[str, ...] = ()  # acceptable kernels that lost by order

    def __str__(self) -> str:
        rows = [f"{self.op} on {self.chip}: " + (f"chosen {self.chosen.name}" if self.chosen else "no kernel")]
        rows += ["    " + "  ".join(str(t) for t in self.types if t is not None)]
        rows += [f"  rejected  {n:<16} {why}" for n, why in self.rejected]
        rows += [
            f"  passed    {n:<16} acceptable, ordered after {self.chosen and self.chosen.name}" for n in self.passed
        ]
        return "\n".join(rows)


_MEMO: dict[Any, Kernel] = {}
_REFERENCES: dict[Any, Kernel] = {}


def reference(op: Op, types: tuple[Type | None, ...] = ()) -> Kernel:
    """The op's reference body as a kernel; operands in a storage format are unpacked first."""
    tensors = ((o.name, t) for o, t in zip(op.operands, types, strict=False) if isinstance(t, TensorType))
    fmt = {name: t.fmt for name, t in tensors if t.fmt != "nd"}
    key = op.name, *sorted(fmt.items())
    if key not in _REFERENCES or _REFERENCES[key].op is not op:
        fn = op.reference
        if fmt:
            def fn(*operands: Any, **params: Any) -> Any:
                return op.reference(*map(plain, operands), **params)
        host = tuple(o.name for o in op.operands if o.host)
        _REFERENCES[key] = Kernel(op, "reference", fn, priority=-1000, fmt=fmt, host=host)
    return _REFERENCES[key]


def choose(op: Op, types: tuple[Type | None, ...], params: Params, chip: Chip) -> Kernel:
    """The kernel for operands of these types on this chip; `NoKernel` lists every rejection."""
    key = (op, types, params, chip.name)
    found = _MEMO.get(key)
    if found is None:
        choice = explain(op, types, params, chip)
        if choice.chosen is None:
            raise NoKernel(_no_kernel(choice, chip))
        found = _MEMO[key] = choice.chosen
    return found


def explain(op: Op, types: tuple[Type | None, ...], params: Params, chip: Chip) -> Choice:
    """Which kernel, and the reason for each that was not taken."""
    good, bad = [], []
    for k in op.kernels:
        why = rejection(k, types, params, chip)
        if why:
            bad.append((k.name, why))
        else:
            good.append(k)
    order = chip.prefer.get(op.name, ())
    good.sort(key=lambda k: (order.index(k.name) if k.name in order else len(order), -k.priority, k.name))
    if chip.allows_reference:
        good.append(reference(op, types))
    else:
        bad.append(("reference", "this chip allows no reference bodies"))
    return Choice(op.name, types, chip.name, good[0] if good else None, tuple(bad), tuple(k.name for k in good[1:]))


def rejection(k: Kernel, types: tuple[Type | None, ...], params: Params, chip: Chip) -> str | None:
    """Why this kernel cannot run here, or None."""
    lacking = k.needs - chip.features
    if lacking:
        return f"needs {', '.join(sorted(lacking))}"
    for o, t in zip(k.op.operands, types, strict=True):
        if not isinstance(t, TensorType):
            continue
        free = not (isinstance(o.dtype, frozenset) and len(o.dtype) == 1)  # a float32-only operand is no choice
        if k.dtypes is not None and free and t.dtype.is_floating_point and t.dtype not in k.dtypes:
            return f"dtype {t.dtype} of {o.name} is not in {sorted(str(d) for d in k.dtypes)}"
        want = k.fmt.get(o.name, "nd")
        if t.fmt != want:
            return f"{o.name} must be stored {want!r}, is {t.fmt!r}"
    if k.when is not None and not k.when(*types, **dict(params)):
        return "its condition on the operand types is false" + (f": {k.when.__doc__}" if k.when.__doc__ else "")
    return None


def _no_kernel(c: Choice, chip: Chip) -> str:
    rows = [
        f"{c.op} has no kernel on chip {c.chip!r} for",
        "    " + "  ".join(str(t) for t in c.types if t is not None),
    ]
    rows += [f"  rejected  {n:<16} {why}" for n, why in c.rejected]
    rows += [f"Set dtype to one of {', '.join(chip.dtypes)}, or add a kernel (docs/add-an-op.md)."]
    return "\n".join(rows)
