"""`jit` turns a function of trees into programs: traced once per declared size, parameters bound once, state donated.

How many programs there are follows from what is declared:

    ladder    one per bucket; the caller pads (chips that capture)
    ranges    one per range, if the program is the same at its ends and between: it then holds for every size inside
    neither   one per combination of exact leaf types (notebooks)
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from afl import tree
from afl.chip import Chip
from afl.errors import AflError, ConfigError, RetraceError
from afl.ir.buckets import Ladder, Range, Sizes, inside, probes, show_sizes
from afl.ir.passes import drop_unit_collectives, exact
from afl.ir.program import BoundProgram, Program, compile_graph, difference
from afl.ir.pytree import register_pytrees
from afl.ir.rewrite import Rule
from afl.ir.trace import Checked, Eager, trace, using
from afl.types import type_of

MOST_RECENT = 4096
TAGS = {"params": "param", "state": "state", "batch": "batch"}     # arguments that are tagged by their name


def jit(
    fn: Callable[..., Any],
    *,
    chip: Chip | str = "cpu",
    donate: Sequence[int | str] = (),
    tags: Sequence[str] | None = None,
    abstract: Callable[[dict[str, int]], Sequence[Any]] | None = None,
    ranges: Range | Sequence[Range] = (),
    ladder: Ladder | None = None,
    mesh: Any = None,
    strict: bool = False,
    rules: Sequence[Rule] = (),
    references: bool = False,
    checked: bool = False,
    eager: bool = False,
    name: str = "",
) -> "Jitted":
    """A callable with the meaning of `fn`, run as compiled programs on `chip`.

    donate: arguments, by position or name, that a call takes: their storage is reused, reading them later raises.
    tags: per argument "param" (bound once, by identity), "state" or "batch"; by default from the names in `TAGS`.
    abstract: sizes -> the arguments as trees of types; needed for `ladder`, `ranges`, `.program(...)` and `.warm()`.
    strict: a trace that was not declared, or that comes after `.warm()`, raises RetraceError.
    eager: nothing is traced; every op runs at once.

    >>> import torch; from afl.ops.basic import add
    >>> f = jit(lambda a, b: add(a, b))
    >>> f(torch.ones(2), torch.ones(2)), f.traces
    (tensor([2., 2.]), 1)
    """
    from afl.plugins import chip as load_chip

    register_pytrees()
    names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    bad = [d for d in donate if d not in names and d not in range(len(names))]
    if bad:
        raise ConfigError(f"donate names {bad[0]!r}, the function takes {', '.join(names)}")
    taken = frozenset(names.index(d) if isinstance(d, str) else d for d in donate)
    marks = tuple(tags or (TAGS.get(n, "state" if i in taken else "batch") for i, n in enumerate(names)))
    if any(marks[i] == "param" for i in taken if i < len(marks)):
        raise ConfigError("parameters stay bound to the program and cannot be donated")
    cells = (ranges,) if isinstance(ranges, Mapping) else tuple(ranges)
    if (cells or ladder) and abstract is None:
        raise ConfigError("ladder and ranges need `abstract`, which gives the argument types at given sizes")
    chip = load_chip(chip) if isinstance(chip, str) else chip
    name = name or getattr(fn, "__name__", "step").replace("<lambda>", "step")
    return Jitted(Options(
        fn, chip, name, tuple(names), marks, taken, abstract, cells, ladder, _axes(mesh), strict, tuple(rules),
        references, checked, eager,
    ))


@attrs.frozen(eq=False)
class Options:
    """What `jit` was called with."""

    fn: Callable[..., Any]
    chip: Chip
    name: str
    names: tuple[str, ...]
    tags: tuple[str, ...]
    donate: frozenset[int]
    abstract: Callable[[dict[str, int]], Sequence[Any]] | None
    ranges: tuple[Range, ...]
    ladder: Ladder | None
    mesh: Mapping[str, int]
    strict: bool
    rules: tuple[Rule, ...]
    references: bool
    checked: bool
    eager: bool


class Jitted:
    """The programs of one function.  `traces` counts the programs made; the probes of one range count once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.traces = 0
        self.warmed = False
        self.reasons: dict[int, str] = {}               # range index -> why one program does not cover it
        self._programs: dict[Any, Program] = {}
        self._bound: dict[Any, BoundProgram] = {}
        self._recent: dict[Any, BoundProgram] = {}      # sizes asked for lately, so that a step costs one look-up
        self._params: tuple[Any, ...] = ()              # the parameter trees that programs are bound to
        self._leaves: list[Any] = []
        self._param_key: Any = None
        self._param_homes: dict[int, str] = {}

    # ---- sizes in, flat program out (engines)

    def bind(self, *params: Any) -> "Jitted":
        """Fix the parameter trees.  The same objects again cost nothing; others bind all programs anew."""
        if len(params) != len(self._params) or any(a is not b for a, b in zip(params, self._params, strict=True)):
            self._leaves, structure = tree.flatten(params)
            self._params, self._bound, self._recent = params, {}, {}
            self._param_key = (structure, *map(type_of, self._leaves))
            self._param_homes = {_home(x): "the parameters" for x in self._leaves}
        return self

    def program(self, **sizes: int) -> BoundProgram:
        """The program for these sizes: flat inputs without the parameters in, flat results out.

        With a ladder it is that of the next bucket (`.sizes` says which, the caller pads); sizes beyond the largest
        bucket get a program of their own.  The parameters must have been given to `bind`.
        """
        key = tuple(sizes.items())
        found = self._recent.get(key)
        if found is None:
            found = self._find(sizes)
            if len(self._recent) >= MOST_RECENT:
                self._recent.clear()
            self._recent[key] = found
        return found

    def _find(self, sizes: Sizes) -> BoundProgram:
        o = self.options
        if o.eager:
            raise ConfigError("eager was asked for: nothing is traced; call the function on trees")
        key: Any = None
        declared = True
        fixed: Sizes | None = None
        if o.ladder is not None:
            fixed = o.ladder.fit(sizes)
            declared = fixed is not None
            fixed = fixed or sizes
        else:
            i = next((i for i, r in enumerate(o.ranges) if inside(sizes, r)), None)
            declared = i is not None
            if i is None or i in self.reasons:
                fixed = sizes
            else:
                key = i
        if fixed is not None:
            key = tuple(fixed.items())
        bound = self._bound.get(key)
        return bound if bound is not None else self._program(key, sizes, fixed, declared)

    def _program(self, key: Any, sizes: Sizes, fixed: Sizes | None, declared: bool) -> BoundProgram:
        made = self._programs.get(key)
        if made is None:
            if not declared and self.options.strict:
                raise RetraceError(self._undeclared(sizes))
            self._count(f"sizes {show_sizes(fixed or sizes)}")
            made = self._compile(fixed) if fixed is not None else self._widen(key)
            if made is None:
                return self._find(sizes)
            self._programs[key] = made
        bound = attrs.evolve(made.bind(self._leaves), sizes=fixed)
        self._bound[key] = bound
        return bound

    def _widen(self, i: int) -> Program | None:
        """One program for a whole range, or None with the reason kept."""
        points = probes(self.options.ranges[i])
        made = [self._compile(p) for p in points]
        rigid = next((k for k in made[0].plan.kernels if not k.widens), None)
        why = rigid and f"kernel {rigid.name} of {rigid.op.name} does not widen"
        for p, other in zip(points[1:], made[1:], strict=True):
            d = None if why else difference(made[0], other)
            why = why or (d and f"between {show_sizes(points[0])} and {show_sizes(p)}: {d}")
        if why:
            self.traces -= 1        # the exact program that takes its place counts itself
            self.reasons[i] = why
            return None
        return made[1] if len(made) > 1 else made[0]

    def _compile(self, sizes: Sizes) -> Program:
        assert self.options.abstract is not None, "sizes need `abstract`"
        return self._trace(tuple(self.options.abstract(dict(sizes))), {})

    def _trace(self, args: tuple[Any, ...], static: dict[str, Any]) -> Program:
        o = self.options
        traced = trace(o.fn, *args, tags=o.tags, **static)
        traced = attrs.evolve(traced, graph=drop_unit_collectives(traced.graph, o.mesh))
        given, donated = 0, []
        for i, a in enumerate(args):
            n = len(tree.leaves(a))
            donated += traced.graph.ins[given : given + n] if i in o.donate else ()
            given += n
        return compile_graph(
            traced, o.chip, donate=donated, references=o.references, checked=o.checked, rules=o.rules, name=o.name,
        )

    def warm(self, *args: Any, **static: Any) -> "Jitted":
        """Make every declared program, largest first, or the one for these arguments.  Strict mode traces no more."""
        o = self.options
        if not o.eager:
            self.warmed = False
            if args:
                self._exact(args, static)
            elif o.ladder is not None:
                for sizes in o.ladder.buckets():
                    self.program(**sizes)
            else:
                for i in range(len(o.ranges)):
                    if i not in self._programs and i not in self.reasons:
                        self._count(f"range {i}")
                        made = self._widen(i)
                        self._programs.update({} if made is None else {i: made})
            self.warmed = True
        return self

    # ---- trees in, trees out

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Call with trees; keywords are static.  Donated arguments are emptied afterwards."""
        if self.options.eager:
            return self._eager(args, static)
        prog, rest = self._exact(args, static)
        self._check_homes(args)
        out = prog.on(*rest)
        self._poison(args, sys._getframe(1))
        return out

    def _exact(self, args: tuple[Any, ...], static: dict[str, Any]) -> tuple[BoundProgram, list[Any]]:
        o = self.options
        if len(args) != len(o.tags):
            raise ConfigError(f"{o.name} takes {len(o.tags)} arguments ({', '.join(o.names)}), got {len(args)}")
        self.bind(*(a for a, t in zip(args, o.tags, strict=True) if t == "param"))
        rest = [a for a, t in zip(args, o.tags, strict=True) if t != "param"]
        leaves, structure = tree.flatten(tuple(rest))
        types = [type_of(x) for x in leaves]
        key = ("exact", self._param_key, structure, *types, *((n, exact(v)) for n, v in sorted(static.items())))
        try:
            bound = self._bound.get(key)
        except TypeError:
            raise ConfigError(f"{o.name}: static keywords are hashable values, got {static}") from None
        if bound is None:
            if key not in self._programs:
                self._count("arguments " + ", ".join(map(str, types[:6])) + (", ..." if len(types) > 6 else ""))
                self._programs[key] = self._trace(args, static)
            bound = self._bound[key] = self._programs[key].bind(self._leaves)
        return bound, rest

    def _eager(self, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
        o = self.options
        self._check_homes(args)
        donated = tuple(args[i] for i in sorted(o.donate))
        with using((Checked if o.checked else Eager)(o.chip, donated, o.references)):
            out = o.fn(*args, **static)
        self._poison(args, sys._getframe(2))
        return out

    def _poison(self, args: tuple[Any, ...], frame: Any) -> None:
        if self.options.donate:
            where = f"{self.options.name}() at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            for i in self.options.donate:
                tree.poison(args[i], where)

    def _check_homes(self, args: tuple[Any, ...]) -> None:
        """Donated storage must belong to one leaf only, or an overwrite would show elsewhere."""
        o = self.options
        if not o.donate:
            return
        seen: dict[int, str] = dict(self._param_homes)
        for taken in (False, True):
            for i, a in enumerate(args):
                if (i in o.donate) is taken and o.tags[i] != "param":
                    for path, x in tree.paths(a, o.names[i]):
                        home = _home(x)
                        if taken and home and home in seen:
                            raise AflError(f"{path} is donated but shares storage with {seen[home]}; pass a copy of it")
                        seen[home] = path

    # ---- reading

    def _count(self, what: str) -> None:
        if self.options.strict and self.warmed:
            raise RetraceError(f"{self.options.name} would be traced after warm-up, for {what}. {self._declared()}")
        self.traces += 1

    def _undeclared(self, sizes: Sizes) -> str:
        return f"{self.options.name} would be traced for {show_sizes(sizes)}, which is not declared. {self._declared()}"

    def _declared(self) -> str:
        o = self.options
        if o.ladder is not None:
            return "Declared buckets: " + "; ".join(f"{n} {list(s)}" for n, s in o.ladder.steps.items()) + "."
        rows = [", ".join(f"{n} {lo}..{hi}" for n, (lo, hi) in r.items()) for r in o.ranges]
        if not rows:
            return "Declare shapes by calling warm(*args) once for each."
        rows = [r + (f" (not one program: {self.reasons[i]})" if i in self.reasons else "") for i, r in enumerate(rows)]
        return "Declared ranges: " + "; ".join(rows) + "."

    def programs(self) -> list[Program]:
        """The programs made so far."""
        return list(self._programs.values())

    def __repr__(self) -> str:
        rows = [f"jit({self.options.name} on {self.options.chip.name}): {self.traces} traces. {self._declared()}"]
        rows += [f"  {p.plan!r}" for p in self.programs()[:12]]
        return "\n".join(rows)


def _axes(mesh: Any) -> dict[str, int]:
    return {} if mesh is None else dict(getattr(mesh, "axes", mesh))


def _home(x: Any) -> int:
    """Address of a tensor's storage; 0 if it has none."""
    return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) and x.numel() else 0
