"""What an op call does: run (`Eager`, `Checked`) or be recorded (`Record`, `trace`).

`Op.__call__` asks the current interpreter, a thread-local stack whose bottom is eager execution on the cpu chip.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from afl import chip as chips
from afl import tree
from afl.chip import Chip
from afl.errors import CheckFailed, TraceError
from afl.ir.graph import Equation, Graph, Var
from afl.ir.kernel import choose, reference
from afl.ir.op import Op, size_of
from afl.layout import copy
from afl.types import HostInts, HostIntsType, TensorType, Type, type_of

_STATE = threading.local()
_HERE = str(Path(__file__).parent)
_OPS = str(Path(__file__).parent.parent / "ops")
_NOT_MODELS = (_HERE, _OPS, functools.__file__)      # dispatch on a weight's struct goes through functools


def current() -> Any:
    """The interpreter of this thread."""
    stack = getattr(_STATE, "stack", None)
    if not stack:
        from afl.plugins import chip as load_chip

        stack = _STATE.stack = [Eager(load_chip("cpu"))]
    return stack[-1]


@contextmanager
def using(interpreter: Any) -> Iterator[Any]:
    """Make `interpreter` the current one inside the block."""
    current()
    _STATE.stack.append(interpreter)
    try:
        yield interpreter
    finally:
        _STATE.stack.pop()


# ---- running -----------------------------------------------------------------------------------------------------


class Eager:
    """Choose a kernel per call (memoised) and run it.

    Functional by default: an in-place kernel gets a clone of the operand it overwrites.  Tensors whose storage is
    given as `donated` are overwritten instead; the caller promises not to read their old values.
    """

    def __init__(self, chip: Chip, donated: Any = (), references: bool = False) -> None:
        self.chip, self.references = chip, references
        self.donated = {x.untyped_storage().data_ptr() for x in tree.leaves(donated) if isinstance(x, torch.Tensor)}

    def apply(self, op: Op, args: tuple[Any, ...], params: dict[str, Any]) -> Any:
        args, values = op.bind(args, params)
        types = _types(op, args)
        op.infer(types, values)
        k = reference(op, types) if self.references else choose(op, types, values, self.chip)
        return self.run(op, k, args, types, values)

    def run(self, op: Op, k: Any, args: tuple[Any, ...], types: Any, values: Any) -> Any:
        if k.inplace:
            args = list(args)  # type: ignore[assignment]
            homes = [x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else 0 for x in args]
            for name in dict.fromkeys(k.inplace.values()):
                i = next(i for i, o in enumerate(op.operands) if o.name == name)
                # a second operand in the same storage would be read after it was overwritten
                if homes[i] and (homes[i] not in self.donated or homes.count(homes[i]) > 1):
                    args[i], homes[i] = copy(args[i]), 0  # type: ignore[index]
        return k.fn(*args, **dict(values))


class Checked(Eager):
    """Eager plus contracts: index ranges, finite floating results, results of the types that the rule gives."""

    def run(self, op: Op, k: Any, args: tuple[Any, ...], types: Any, values: Any) -> Any:
        check_indices(op, args, types)
        out = super().run(op, k, args, types, values)
        check_results(op, k.name, out, op.infer(types, values))
        return out


def check_indices(op: Op, args: tuple[Any, ...], types: tuple[Type | None, ...]) -> None:
    """Raise CheckFailed if an index operand holds a value outside its declared range."""
    dims = None
    for o, x in zip(op.operands, args, strict=True):
        if o.index is None or x is None:
            continue
        dims = dims or op.dims(types)
        values = x if isinstance(x, torch.Tensor) else x.tensor
        if values.numel() == 0:
            continue
        high = size_of(o.index.limit, dims)
        low = -1 if o.index.none else -size_of(o.index.low, dims) if o.index.low else 0
        least, most = int(values.min()), int(values.max())
        if least < low or most >= high:
            bad = least if least < low else most
            raise CheckFailed(
                f"{op.name}: operand {o.name!r} holds index {bad}, allowed are {low} to {high - 1} "
                f"({o.index.limit} = {high}){'; -1 means nothing' if o.index.none else ''}"
            )


def check_results(op: Op, kernel: str, out: Any, want: tuple[TensorType, ...]) -> None:
    """Raise CheckFailed if a result has another type than the rule says, or is not finite."""
    outs = out if isinstance(out, tuple) else (out,)
    got = tuple(type_of(x) for x in outs)
    if got != want:
        given, said = ", ".join(map(str, got)), ", ".join(map(str, want))
        raise CheckFailed(f"{op.name}/{kernel} returned {given}; its rule says {said}")
    for i, x in enumerate(outs):
        if x.is_floating_point() and not op.name.startswith("edit_") and bool(torch.isnan(x).any()):
            raise CheckFailed(f"{op.name}/{kernel}: result {i} holds NaN")


def _types(op: Op, args: tuple[Any, ...]) -> tuple[Type | None, ...]:
    try:
        return tuple(None if x is None else type_of(x) for x in args)
    except TypeError as e:
        raise TraceError(
            f"{op.name}: {e}; outside of tracing, operands are tensors or HostInts"
            + " (a traced value was used after its trace had ended)" * any(isinstance(x, Traced) for x in args)
        ) from None


# ---- recording ---------------------------------------------------------------------------------------------------

_OPERATORS: dict[str, Op] = {}


def operator(symbol: str, op: Op) -> Op:
    """Say which op a Python operator on a traced value stands for ("add", "reshape", ...)."""
    _OPERATORS[symbol] = op
    return op


class Traced:
    """Stands for a value while tracing.  Knows shape and dtype, not contents."""

    __slots__ = ("var", "_record", "where")

    def __init__(self, var: Var, record: "Record", where: str) -> None:
        self.var, self._record, self.where = var, record, where

    @property
    def shape(self) -> tuple[int, ...]:
        t = self.var.type
        return t.shape if isinstance(t, TensorType) else (t.size,)

    @property
    def dtype(self) -> torch.dtype:
        t = self.var.type
        assert isinstance(t, TensorType), "a host vector has no dtype"
        return t.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __add__(self, other: Any) -> Any:
        return _OPERATORS["add"](self, other)

    def __sub__(self, other: Any) -> Any:
        return _OPERATORS["sub"](self, other)

    def __mul__(self, other: Any) -> Any:
        return _OPERATORS["mul"](self, other) if _is_value(other) else _OPERATORS["scale"](self, by=float(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return _OPERATORS["div"](self, other) if _is_value(other) else _OPERATORS["scale"](self, by=1.0 / float(other))

    def __getitem__(self, key: Any) -> Any:
        return _OPERATORS["getitem"](self, key=_slices(key))

    def reshape(self, *shape: int) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return _OPERATORS["reshape"](self, shape=tuple(sizes))

    def to(self, dtype: torch.dtype) -> Any:
        return self if dtype == self.dtype else _OPERATORS["cast"](self, dtype=dtype)

    def __bool__(self) -> bool:
        instead = "use a masked op, or make the choice a static parameter"
        raise TraceError(self._refuse("a branch on a traced value", instead))

    def item(self) -> Any:
        raise TraceError(self._refuse("item()", "pass the number as HostInts or as a static parameter"))

    __int__ = __float__ = __index__ = item

    def __iter__(self) -> Iterator[Any]:
        raise TraceError(self._refuse("iteration", "use slicing with static bounds"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(self._refuse(f".{name}", "call an op from afl.ops (afl.ir.op.registered() lists them)"))

    def _refuse(self, what: str, instead: str) -> str:
        source = f"the value {self.var.type} comes from {self.where}"
        return f"{what} is not possible while tracing; {source}. Instead: {instead}."

    def __repr__(self) -> str:
        return f"Traced({self.var.type})"


def _is_value(x: Any) -> bool:
    return isinstance(x, Traced | torch.Tensor)


def _slices(key: Any) -> tuple[Any, ...]:
    keys = key if isinstance(key, tuple) else (key,)
    out: list[Any] = []
    for k in keys:
        if isinstance(k, slice):
            out.append((k.start, k.stop, k.step))
        elif k is Ellipsis:
            out.append("...")
        elif isinstance(k, int):
            out.append(k)
        else:
            raise TraceError(f"a traced value can be indexed with static slices and integers only, got {k!r}")
    return tuple(out)


class Record:
    """Records equations instead of running them."""

    def __init__(self) -> None:
        self.eqns: list[Equation] = []
        self.consts: dict[int, tuple[Var, Any]] = {}
        self.open = True

    def apply(self, op: Op, args: tuple[Any, ...], params: dict[str, Any]) -> Any:
        args, values = op.bind(args, params)
        where = caller()
        ins = tuple(None if x is None else self.var_of(op, x) for x in args)
        types = op.infer(tuple(v.type if v is not None else None for v in ins), values)
        outs = tuple(Var(t) for t in types)
        self.eqns.append(Equation(op, ins, values, outs, where))
        made = tuple(Traced(v, self, where) for v in outs)
        return made[0] if op.single else made

    def var_of(self, op: Op, x: Any) -> Var:
        if isinstance(x, Traced):
            if x._record is not self or not self.open:
                ended = f"a traced value was used after its trace had ended; it was made at {x.where}"
                raise TraceError(f"{op.name}: {ended}")
            return x.var
        if isinstance(x, torch.Tensor | HostInts):
            if id(x) not in self.consts:
                self.consts[id(x)] = (Var(type_of(x), "const"), x)
            return self.consts[id(x)][0]
        kind = type(x).__name__
        raise TraceError(f"{op.name}: operand of type {kind}; operands are tensors, parameters are keywords")


def caller() -> str:
    """"file:line" of the nearest caller outside the op layer and this package's IR."""
    f = sys._getframe(2)
    while f.f_back is not None and f.f_code.co_filename.startswith(_NOT_MODELS):
        f = f.f_back
    return f"{Path(f.f_code.co_filename).name}:{f.f_lineno}"


@attrs.frozen
class TracedGraph:
    """A graph with the structures of the function's arguments and result."""

    graph: Graph
    args: tree.TreeDef
    result: tree.TreeDef


def trace(fn: Callable[..., Any], *args: Any, tags: tuple[str, ...] = (), **static: Any) -> TracedGraph:
    """Record `fn(*args, **static)`.

    Leaves of `args` are tensors, HostInts or their types; only types matter.  `tags[i]` marks the leaves of argument i
    ("param", "state", "batch").  `static` is passed through untouched.

    >>> import torch; from afl.ops.basic import add
    >>> t = TensorType((2,), torch.float32)
    >>> print(trace(lambda a, b: a + b, t, t).graph)
    graph(%0:f32[2] %1:f32[2])
      %2:f32[2] = add %0 %1
      return %2
    """
    record = Record()
    ins: list[Var] = []
    marks: dict[Var, str] = {}
    given = []
    for i, a in enumerate(args):
        leaves = []
        for path, leaf in tree.paths(a):
            v = Var(type_of(leaf), path)
            ins.append(v)
            if i < len(tags):
                marks[v] = tags[i]
            leaves.append(Traced(v, record, f"argument {i} {path}".strip()))
        given.append(tree.unflatten(tree.flatten(a)[1], leaves))
    try:
        with using(record):
            result = fn(*given, **static)
    finally:
        record.open = False
    leaves, treedef = tree.flatten(result)
    outs = []
    for x in leaves:
        if isinstance(x, Traced):
            outs.append(x.var)
        elif isinstance(x, torch.Tensor):
            record.open = True
            outs.append(record.var_of(_OPERATORS["add"], x))
            record.open = False
        else:
            raise TraceError(f"the traced function returned a {type(x).__name__}; results are trees of tensors")
    consts = {v: value for v, value in record.consts.values()}
    marks.update(dict.fromkeys(consts, "const"))
    graph = Graph((*ins, *consts), tuple(record.eqns), tuple(outs), marks, consts)
    return TracedGraph(graph, tree.flatten(args)[1], treedef)


__all__ = [
    "Checked", "Eager", "HostIntsType", "Record", "Traced", "TracedGraph", "chips", "current", "operator", "trace",
    "using",
]
