"""A program is one generated straight-line Python function: one line per equation, `del` after the last use.

Kernels, parameters and constants are globals of its namespace, so a call costs little more than the kernels.  The
source is kept on `program.source` and registered with linecache; an exception gets a note that names the equation and
the line of the model it came from.
"""

import functools
import itertools
import keyword
import linecache
import math
import re
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from afl import layout, tree
from afl.chip import Chip
from afl.errors import CheckFailed, TypeRuleError
from afl.ir.graph import Equation, Graph, Var, line, numbering
from afl.ir.kernel import Kernel
from afl.ir.passes import cse, dce, exact, usable
from afl.ir.plan import Plan, plan
from afl.ir.rewrite import Rule, rewrite
from afl.ir.trace import TracedGraph, check_indices, check_results
from afl.types import HostInts, type_of


@attrs.frozen(eq=False, repr=False)
class Program:
    """A compiled graph whose parameters are still free.

    inputs: what a bound program takes, in this order.     params: what `bind` takes, in this order.
    constants: namespace entries that are no kernels.      lines: source line -> equation.
    args, result: structures of the traced function, if it was traced from one (args includes the parameters).
    """

    name: str
    plan: Plan
    source: str
    code: types.CodeType
    inputs: tuple[Var, ...]
    params: tuple[tuple[str, Var], ...]
    kernels: Mapping[str, Callable[..., Any]]
    constants: Mapping[str, Any]
    lines: Mapping[int, int]
    args: tree.TreeDef | None = None
    result: tree.TreeDef | None = None

    @property
    def graph(self) -> Graph:
        return self.plan.graph

    def bind(self, params: Sequence[Any] = ()) -> "BoundProgram":
        """Fix the parameters; `params` are the leaves of the parameter tree, in tree order."""
        if len(params) != len(self.params):
            raise TypeRuleError(f"program {self.name!r} has {len(self.params)} parameters, got {len(params)}")
        space: dict[str, Any] = {"__builtins__": {}, "__name__": "afl.programs", **self.kernels, **self.constants}
        for (name, v), x in zip(self.params, params, strict=True):
            if type_of(x) != v.type:
                raise TypeRuleError(f"parameter {v.name or name} of {self.name!r} is {type_of(x)}, traced as {v.type}")
            space[name] = x
        return BoundProgram(self, types.FunctionType(self.code, space, self.name))

    def __repr__(self) -> str:
        rows = self.source.rstrip().splitlines()
        return "\n".join(rows if len(rows) <= 20 else [*rows[:10], f"    # ... {len(rows) - 15} more", *rows[-5:]])


@attrs.frozen(eq=False, repr=False)
class BoundProgram:
    """A program with its parameters: takes the flat inputs, returns the flat results as a tuple."""

    program: Program
    fn: Callable[..., tuple[Any, ...]]
    sizes: Mapping[str, int] | None = None      # sizes of the bucket it stands for; None if valid for all

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        try:
            return self.fn(*inputs)
        except Exception as e:
            _annotate(self.program, e, len(inputs))
            raise

    def on(self, *trees: Any) -> Any:
        """Call with trees (without the parameters) and return the result as a tree."""
        assert self.program.result is not None, "this program was compiled from a bare graph"
        return tree.unflatten(self.program.result, self(*tree.leaves(trees)))

    def __repr__(self) -> str:
        return repr(self.program)


def compile_graph(
    graph: Graph | TracedGraph, chip: Chip, *, donate: Iterable[Var | str] = (), references: bool = False,
    checked: bool = False, rules: Sequence[Rule] = (), name: str = "step",
) -> Program:
    """Simplify, plan and generate.

    donate: inputs, or tags of inputs, whose storage may be overwritten.  references: every op runs its reference body.
    checked: indices, results and storage of every equation are proved while it runs.
    """
    traced = graph if isinstance(graph, TracedGraph) else None
    g = graph.graph if isinstance(graph, TracedGraph) else graph
    if rules:
        g = rewrite(g, usable(rules, chip), chip)
    g = dce(cse(g))
    p = plan(g, chip, donate=donate, references=references)
    return generate(p, name, checked, traced)


def generate(p: Plan, name: str = "step", checked: bool = False, traced: TracedGraph | None = None) -> Program:
    """Write the Python of a plan and compile it."""
    w = _Writer(p, checked)
    name = _word(name) + "_" * keyword.iskeyword(name)
    inputs = tuple(v for v in p.graph.ins if p.graph.tags.get(v) not in ("param", "const"))
    params = tuple(v for v in p.graph.ins if p.graph.tags.get(v) == "param")
    for v in inputs:
        w.define(v, f"a_{_word(v.name)}" if v.name else f"a{len(w.names)}")
    named = tuple((w.define(v, f"w_{_word(v.name)}"), v) for v in params)
    for v, x in p.graph.consts.items():
        w.constants[w.define(v, f"t{len(w.constants)}")] = x
    rows = [f"def {name}({', '.join(w.names[v] for v in inputs)}):"]
    lines: dict[int, int] = {}
    copied = {(c.at, c.place) for c in p.copies}
    doomed = _deaths(p)
    for i, e in enumerate(p.graph.eqns):
        call = w.call(e, p.kernels[i], [j for j in range(len(e.ins)) if (i, j) in copied])
        outs = [w.define(v, f"v{i}" if len(e.outs) == 1 else f"v{i}_{r}") for r, v in enumerate(e.outs)]
        left = ", ".join(outs) + ("" if e.op.single or len(outs) > 1 else ",")
        rows.append(f"    {left} = {call}" + (f"  # {' '.join(e.where.split())}" if e.where else ""))
        lines[len(rows)] = i
        if doomed[i]:
            rows.append(f"    del {', '.join(w.names[v] for v in doomed[i])}")
    end = len(p.graph.eqns)
    results = [w.copy(v) if (end, j) in copied else w.names[v] for j, v in enumerate(p.graph.outs)]
    rows.append(f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})")
    source = "\n".join(rows) + "\n"
    filename = f"<afl program {name} {next(_SERIAL)}>"
    code = next(c for c in compile(source, filename, "exec").co_consts if isinstance(c, types.CodeType))
    made = Program(
        name, p, source, code, inputs, named, w.kernels, w.constants, lines,
        traced.args if traced else None, traced.result if traced else None,
    )
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(made, linecache.cache.pop, filename, None)
    return made


def same_program(a: Program, b: Program) -> bool:
    """True if both have the same text, kernels and constants, so that neither mentions the sizes it was traced at."""
    return difference(a, b) is None


def difference(a: Program, b: Program) -> str | None:
    """The first thing in which two programs differ, or None."""
    for i, (e, f) in enumerate(zip(a.graph.eqns, b.graph.eqns, strict=False)):
        k, other = a.plan.kernels[i], b.plan.kernels[i]
        if e.op is not f.op or k is not other:
            return f"equation {i} ({e.where}) is {e.op.name}/{k.name} in one, {f.op.name}/{other.name} in the other"
    for x, y in itertools.zip_longest(a.source.splitlines()[1:], b.source.splitlines()[1:], fillvalue="(nothing)"):
        if x != y:
            return f"the line `{x.strip()}` is `{y.strip()}` in the other"
    for name, x in a.constants.items():
        if not _same(x, b.constants.get(name)):
            return f"constant {name} has another value"
    return None if len(a.constants) == len(b.constants) and len(a.inputs) == len(b.inputs) else "their inputs differ"


_SERIAL = itertools.count()


class _Writer:
    """Names of values, kernels and constants of one program."""

    def __init__(self, p: Plan, checked: bool) -> None:
        self.checked = checked
        self.names: dict[Var, str] = {}
        self.taken: set[str] = set()
        self.kernels: dict[str, Callable[..., Any]] = {}
        self.constants: dict[str, Any] = {}
        self._kernel_names: dict[Kernel, str] = {}
        self._values: dict[Any, str] = {}

    def define(self, v: Var, name: str) -> str:
        self.names[v] = self.unique(name)
        return self.names[v]

    def unique(self, name: str) -> str:
        base, n = name, 1
        while name in self.taken or keyword.iskeyword(name):
            name = f"{base}_{n}"
            n += 1
        self.taken.add(name)
        return name

    def call(self, e: Equation, k: Kernel, copied: list[int]) -> str:
        fn = self._kernel_names.get(k)
        if fn is None:
            fn = self._kernel_names[k] = self.unique(f"k_{_word(e.op.name)}_{_word(k.name)}")
            self.kernels[fn] = _checked(k) if self.checked else k.fn
        args = ["None" if v is None else self.names[v] for v in e.ins]
        for j in copied:
            args[j] = self.copy(e.ins[j])
        args += [f"{n}={self.value(v)}" for n, v in e.params]
        return f"{fn}({', '.join(args)})"

    def copy(self, v: Any) -> str:
        """Text of a copy of a tensor, stored as the tensor is."""
        if v.type.fmt == "nd":
            return f"{self.names[v]}.clone()"
        self.constants["copy_stored"] = layout.copy
        return f"copy_stored({self.names[v]})"

    def value(self, v: Any) -> str:
        if _literal(v):
            return repr(v)
        key = exact(v)
        if key not in self._values:
            name = self.unique(_word(str(v)) if isinstance(v, torch.dtype) else f"c{len(self._values)}")
            self._values[key] = name
            self.constants[name] = v
        return self._values[key]


def _literal(v: Any) -> bool:
    """True if repr(v) reads back as v."""
    kind = type(v)
    return (
        v is None or kind in (int, bool, str) or (kind is float and math.isfinite(v))
        or (kind is tuple and all(_literal(x) for x in v))
    )


def _word(s: str) -> str:
    return re.sub(r"\W", "_", s)


def _deaths(p: Plan) -> list[list[Var]]:
    """Values made by equations, by the equation after which nobody reads them."""
    out: list[list[Var]] = [[] for _ in range(len(p.graph.eqns) + 1)]
    for i, e in enumerate(p.graph.eqns):
        for v in e.outs:
            out[p.last.get(v, i)].append(v)
    return out


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return type_of(a) == type_of(b) and torch.equal(a, b)
    return a.list == b.list if isinstance(a, HostInts) else bool(a == b)


def _annotate(p: Program, error: Exception, given: int) -> None:
    if given != len(p.inputs):
        names = ", ".join(v.name or "?" for v in p.inputs[:8]) + (", ..." if len(p.inputs) > 8 else "")
        error.add_note(f"afl: program {p.name!r} takes {len(p.inputs)} inputs ({names}), got {given}")
    t = error.__traceback__
    while t is not None:
        if t.tb_frame.f_code is p.code:
            i = p.lines.get(t.tb_lineno)
            if i is not None:
                e, k = p.graph.eqns[i], p.plan.kernels[i]
                where = f"equation {i} of program {p.name!r}, from {e.where or 'an unknown line'}, kernel {k.name}"
                error.add_note(f"afl: {where}:\n  {line(e, numbering(p.graph))}")
            return
        t = t.tb_next


def _checked(k: Kernel) -> Callable[..., Any]:
    """The kernel with its contract: index ranges before, result types and storage after."""
    op = k.op

    @functools.wraps(k.fn)
    def run(*args: Any, **params: Any) -> Any:
        types_ = tuple(None if x is None else type_of(x) for x in args)
        want = op.infer(types_, tuple(params.items()))
        check_indices(op, args, types_)
        homes = [_home(x) for x in args]
        out = k.fn(*args, **params)
        check_results(op, k.name, out, want)
        for r, x in enumerate(out if isinstance(out, tuple) else (out,)):
            _check_home(k, r, _home(x), homes)
        return out

    return run


def _home(x: Any) -> int:
    """Address of a tensor's storage; 0 if it has none."""
    return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) and x.numel() else 0


def _check_home(k: Kernel, result: int, home: int, homes: list[int]) -> None:
    if home == 0:
        return
    name = k.inplace.get(result)
    at = {o.name: h for o, h in zip(k.op.operands, homes, strict=True)}
    if name is not None and home != at[name]:
        raise CheckFailed(f"{k!r} declares result {result} in place of {name!r} but returned other storage")
    if name is None and k.op.view_of is None and home in homes:
        whose = k.op.operands[homes.index(home)].name
        raise CheckFailed(f"{k!r} returned storage of operand {whose!r} as result {result}; declare inplace or "
                          "view_of, or return a copy")
