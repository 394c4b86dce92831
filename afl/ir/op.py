"""`@op` turns an annotated reference function into an operator: meaning, type rule, cases and tolerances in one object.

The annotation of an operand is `T[Tensor, dims, dtype]`; dims are words unified left to right over all operands:

    "t h e"     three named dimensions          "*b d"      any prefix, then d
    "r+1"       one more than r                 "2*f"       twice f
    "4"         exactly four                    "_"         any size, bound to nothing

The dtype is a class such as FLOAT, or the name of an earlier operand whose dtype is copied.  `T[HostInts, "r"]` is a
vector on the host.  A third kind of fact, `Index("v")`, says that the values are indices below dimension v (checked
mode proves it; `none=True` lets -1 mean "nothing").  Positional arguments are operands, keyword-only ones are static
parameters.  Example:

    @op
    def scale(x: T[Tensor, "*b d", FLOAT], g: T[Tensor, "d", "x"], *, k: float) -> T[Tensor, "*b d", "x"]: ...
"""

import inspect
import re
import types as pytypes
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated as T
from typing import Any

import attrs
import torch

from afl.errors import AflError, TypeRuleError
from afl.types import HostInts, HostIntsType, TensorType, Type

__all__ = [
    "ANY", "BOOL", "FLOAT", "FLOAT32", "HALF", "INT", "INT32", "INT8", "UINT8", "Index", "Op", "T", "op", "registered",
]

FLOAT = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
FLOAT32 = frozenset({torch.float32})
HALF = frozenset({torch.float16, torch.bfloat16})
INT32 = frozenset({torch.int32})
INT8 = frozenset({torch.int8})
UINT8 = frozenset({torch.uint8})
INT = frozenset({torch.int32, torch.int64})
BOOL = frozenset({torch.bool})
ANY = None

Params = tuple[tuple[str, Any], ...]


@attrs.frozen
class Index:
    """The operand's values lie in [0, limit), limit a product of dimensions such as "b*s"; -1 allowed if `none`.

    `low` admits negative codes down to -low (exclusive of nothing): "n" lets -1 ... -n through.
    """

    limit: str
    none: bool = False
    low: str | None = None


@attrs.frozen
class Operand:
    """What the annotation of one operand, or of one result, says."""

    name: str
    host: bool
    dims: tuple[str, ...]
    dtype: frozenset[torch.dtype] | str | None
    optional: bool = False
    index: Index | None = None


@attrs.define(eq=False, slots=False)
class Op:
    """An operator.  Calling it hands the operands to the current interpreter (eager, recording, checked).

    view_of: name of the operand of which every result is a view, if any.
    effect: "comm" for communication, None for pure computation.
    vary: dimension names that a captured bucket may pad, for the checker's messages.
    """

    name: str
    reference: Callable[..., Any]
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...] | None
    params: tuple[str, ...]
    defaults: Mapping[str, Any]
    view_of: str | None = None
    effect: str | None = None
    tol: Mapping[torch.dtype, float] = attrs.field(factory=dict)
    kernels: list[Any] = attrs.field(factory=list)
    single: bool = True
    _rule: Callable[..., Any] | None = None
    _cases: Callable[[Any], Iterable[tuple[Any, ...]]] | None = None
    _memo: dict[Any, tuple[TensorType, ...]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.__doc__ = self.reference.__doc__

    def __call__(self, *args: Any, **params: Any) -> Any:
        from afl.ir import trace

        return trace.current().apply(self, args, params)

    def rule(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Set the type rule by hand: operand types and parameters in, result type(s) out."""
        self._rule = fn
        return fn

    def cases(self, fn: Callable[[Any], Iterable[tuple[Any, ...]]]) -> Callable[..., Any]:
        """Set the generator of example calls: rng in, (*operands, params dict) out; drives the conformance suite."""
        self._cases = fn
        return fn

    def examples(self, rng: Any) -> list[tuple[Any, ...]]:
        """The example calls of `cases`, or none."""
        return list(self._cases(rng)) if self._cases else []

    def tolerance(self, dtype: torch.dtype) -> float:
        """Allowed difference of a kernel from the reference, relative to the larger of 1 and the value."""
        return self.tol.get(dtype, {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(dtype, 2e-5))

    def bind(self, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[tuple[Any, ...], Params]:
        """Operands padded with None for absent optional ones, and parameters in declared order with defaults."""
        if len(args) > len(self.operands):
            raise TypeRuleError(f"{self.name} takes {len(self.operands)} operands, got {len(args)}")
        for missing in self.operands[len(args) :]:
            if not missing.optional:
                raise TypeRuleError(f"{self.name} needs operand {missing.name!r}: {self.signature()}")
            args = (*args, None)
        if len(params) != len(self.params) or any(p not in params for p in self.params):
            extra = set(params) - set(self.params)
            if extra:
                raise TypeRuleError(f"{self.name} has no parameter {sorted(extra)}: {self.signature()}")
            lacking = [p for p in self.params if p not in params and p not in self.defaults]
            if lacking:
                raise TypeRuleError(f"{self.name} needs parameter {lacking}: {self.signature()}")
        values = tuple((p, params[p] if p in params else self.defaults[p]) for p in self.params)
        return args, values

    def infer(self, types: tuple[Type | None, ...], params: Params) -> tuple[TensorType, ...]:
        """Result types, or a TypeRuleError that shows declared and given operands."""
        try:
            key = (types, params)
            found = self._memo.get(key)
        except TypeError:
            bad = [f"{n}={v!r}" for n, v in params if not _hashable(v)]
            raise TypeRuleError(f"{self.name}: static parameters must be hashable, got {', '.join(bad)}") from None
        if found is None:
            found = self._infer(types, params)
            self._memo[key] = found
        return found

    def _infer(self, types: tuple[Type | None, ...], params: Params) -> tuple[TensorType, ...]:
        dims: dict[str, Any] = {}
        dtypes: dict[str, torch.dtype] = {}
        for o, t in zip(self.operands, types, strict=True):
            problem = _unify(o, t, dims, dtypes)
            if problem:
                raise TypeRuleError(self._complaint(o.name, problem, types))
        if self._rule is not None:
            try:
                out = self._rule(*types, **dict(params))
            except TypeRuleError as e:
                raise TypeRuleError(self._complaint("", str(e), types)) from None
            return out if isinstance(out, tuple) else (out,)
        assert self.results is not None, f"{self.name}: no annotation of results and no rule"
        fmt: dict[Any, str] = {
            (o.name, o.dims): t.fmt for o, t in zip(self.operands, types, strict=True) if isinstance(t, TensorType)
        }
        return tuple(_build(r, dims, dtypes, fmt.get((r.dtype, r.dims), "nd")) for r in self.results)

    def dims(self, types: tuple[Type | None, ...]) -> dict[str, Any]:
        """Dimension names bound to sizes for operands of these types."""
        dims: dict[str, Any] = {}
        for o, t in zip(self.operands, types, strict=True):
            _unify(o, t, dims, {})
        return dims

    def signature(self) -> str:
        """One line: operands, results, parameters."""
        ins = " ".join(f"{o.name}:{'host' if o.host else ''}[{' '.join(o.dims)}]" for o in self.operands)
        outs = " ".join(f"[{' '.join(o.dims)}]" for o in self.results or ())
        return f"{self.name} {ins} -> {outs or 'by rule'}" + (f" {{{' '.join(self.params)}}}" if self.params else "")

    def _complaint(self, name: str, problem: str, types: tuple[Type | None, ...]) -> str:
        got = "  ".join(f"{o.name}:{t}" for o, t in zip(self.operands, types, strict=True))
        where = f"operand {name!r}: " if name else ""
        return f"{self.name}: {where}{problem}\n  declared  {self.signature()}\n  got       {got}"

    def __repr__(self) -> str:
        return f"<op {self.signature()}>"


_OPS: dict[str, Op] = {}


def registered() -> dict[str, Op]:
    """All declared ops by name."""
    return dict(sorted(_OPS.items()))


def op(
    fn: Callable[..., Any] | None = None,
    *,
    view_of: str | None = None,
    effect: str | None = None,
    tol: Mapping[torch.dtype, float] | None = None,
) -> Any:
    """Declare the decorated function as the reference of an op of the same name."""
    if fn is None:
        return lambda f: op(f, view_of=view_of, effect=effect, tol=tol)
    sig = inspect.signature(fn)
    operands, params, defaults = [], [], {}
    for p in sig.parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            params.append(p.name)
            if p.default is not p.empty:
                defaults[p.name] = p.default
        else:
            operands.append(_operand(p.name, p.annotation, f"{fn.__name__}({p.name})"))
    results, single = _results(sig.return_annotation, fn.__name__)
    name = fn.__name__.rstrip("_")
    if name in _OPS:
        raise AflError(f"op {name!r} is declared twice: {_OPS[name].reference.__module__} and {fn.__module__}")
    made = Op(name, fn, tuple(operands), results, tuple(params), defaults, view_of, effect, tol or {}, single=single)
    _OPS[name] = made
    return made


def _operand(name: str, annotation: Any, where: str) -> Operand:
    optional = False
    if isinstance(annotation, pytypes.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        optional, annotation = True, members[0]
    if typing.get_origin(annotation) is not T:
        raise AflError(f"{where}: annotate it as T[Tensor, dims, dtype] or T[HostInts, dims], got {annotation!r}")
    base, *facts = typing.get_args(annotation)
    dims = tuple(facts[0].split())
    index = next((f for f in facts if isinstance(f, Index)), None)
    dtype = next((f for f in facts[1:] if not isinstance(f, Index)), None)
    return Operand(name, base is HostInts, dims, dtype, optional, index)


def _results(annotation: Any, name: str) -> tuple[tuple[Operand, ...] | None, bool]:
    if annotation is torch.Tensor:  # the shape is the business of the op's own rule
        return None, True
    if typing.get_origin(annotation) is tuple:
        args = typing.get_args(annotation)
        if args[-1] is Ellipsis:
            return None, False
        return tuple(_operand(f"result{i}", a, f"{name} -> {i}") for i, a in enumerate(args)), False
    return (_operand("result", annotation, f"{name} ->"),), True


_PLUS = re.compile(r"^(\w+)([+-])(\d+)$")
_SUM = re.compile(r"^([\w*]+)([+-]\d+)?$")
_TIMES = re.compile(r"^(\d+)\*(\w+)$")


def _unify(o: Operand, t: Type | None, dims: dict[str, Any], dtypes: dict[str, torch.dtype]) -> str | None:
    """Bind the dims of one operand; the text of the problem if it does not fit."""
    if t is None:
        return None if o.optional else "is missing"
    if o.host != isinstance(t, HostIntsType):
        return f"must be {'a host vector (HostInts)' if o.host else 'a tensor'}"
    shape = (t.size,) if isinstance(t, HostIntsType) else t.shape
    names = o.dims
    star = next((i for i, n in enumerate(names) if n.startswith("*")), None)
    if star is not None:
        tail = len(names) - star - 1
        if len(shape) < len(names) - 1:
            return f"has {len(shape)} dimensions, needs at least {len(names) - 1}"
        group = shape[star : len(shape) - tail]
        seen = dims.setdefault(names[star], group)
        if seen != group:
            return f"dimensions {names[star]} are {list(group)}, earlier {list(seen)}"
        pairs = list(zip(names[:star], shape[:star], strict=True))
        pairs += list(zip(names[star + 1 :], shape[len(shape) - tail :], strict=True)) if tail else []
    elif len(shape) != len(names):
        return f"has {len(shape)} dimensions, needs {len(names)}: [{' '.join(names)}]"
    else:
        pairs = list(zip(names, shape, strict=True))
    for n, s in pairs:
        problem = _bind(n, s, dims)
        if problem:
            return problem
    if isinstance(t, TensorType):
        if isinstance(o.dtype, str):
            want = dtypes.get(o.dtype)
            if want is not None and t.dtype != want:
                return f"dtype {t.dtype} differs from that of {o.dtype!r}, {want}"
        elif o.dtype is not None and t.dtype not in o.dtype:
            return f"dtype {t.dtype} is not one of {sorted(map(str, o.dtype))}"
        dtypes[o.name] = t.dtype
    return None


def _bind(n: str, s: int, dims: dict[str, Any]) -> str | None:
    if n == "_":
        return None
    if n.isdigit():
        return None if s == int(n) else f"a dimension is {s}, must be {n}"
    if m := _PLUS.match(n):
        n, s = m[1], s - int(m[3]) * (1 if m[2] == "+" else -1)
    elif m := _TIMES.match(n):
        if s % int(m[1]):
            return f"a dimension is {s}, must be a multiple of {m[1]} ({n})"
        n, s = m[2], s // int(m[1])
    seen = dims.setdefault(n, s)
    return None if seen == s else f"dimension {n} is {s}, earlier {seen}"


def size_of(expression: str, dims: Mapping[str, Any]) -> int:
    """The value of a dimension word such as "r+1", "2*f" or "b*s+1"."""
    m = _SUM.match(expression)
    assert m, f"not a dimension expression: {expression!r}"
    total = 1
    for part in m[1].split("*"):
        total *= int(part) if part.isdigit() else dims[part]
    return total + int(m[2] or 0)


def _build(r: Operand, dims: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], fmt: str) -> TensorType:
    """The type of a result.  One that is declared like an operand, dims and dtype, is stored like it."""
    shape: list[int] = []
    for n in r.dims:
        if n.startswith("*"):
            shape.extend(dims[n])
        else:
            shape.append(size_of(n, dims))
    dtype = dtypes[r.dtype] if isinstance(r.dtype, str) else next(iter(r.dtype or ()), None)
    assert dtype is not None, f"result {r.name} declares no single dtype"
    return TensorType(tuple(shape), dtype, fmt)


def _hashable(v: Any) -> bool:
    try:
        hash(v)
    except TypeError:
        return False
    return True
