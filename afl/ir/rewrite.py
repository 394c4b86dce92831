"""Rewrite rules: two traced functions, one to look for and one to put in its place.

Parameters with the same name in both are wildcards: positional ones stand for values, keyword-only ones for static
parameters.  The pattern is recorded without types, so its parameters may be unknown.  Example:

    def pattern(x, r, g, *, eps):
        y, s = add_rms_norm(x, r, g, eps=eps)
        q, scale = quant_dynamic(y)
        return q, scale, s

    def fused(x, r, g, *, eps):
        return add_rms_norm_quant(x, r, g, eps=eps)

    NORM_QUANT = Rule(pattern, fused, when=lambda x: x.dtype in HALF)
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from afl import tree
from afl.chip import Chip
from afl.errors import GraphError, NoKernel, TraceError, TypeRuleError
from afl.ir.graph import Equation, Graph, Var
from afl.ir.kernel import choose
from afl.ir.op import Op, Params
from afl.ir.trace import _OPERATORS, Record, Traced, using


@attrs.frozen
class Wild:
    """Stands for an unknown static parameter of a pattern; may sit inside a tuple."""

    name: str


@attrs.frozen(eq=False)
class Hole:
    """An operand wildcard of a pattern."""

    name: str


@attrs.frozen(eq=False)
class Part:
    """Result `index` of a pattern's equation."""

    eqn: "PatternEquation"
    index: int


@attrs.frozen(eq=False)
class PatternEquation:
    """One op call of a pattern."""

    op: Op
    ins: tuple[Hole | Part | None, ...]
    params: Params


@attrs.frozen(eq=False)
class Pattern:
    """A recorded pattern; the last equation is where matching starts."""

    eqns: tuple[PatternEquation, ...]
    outs: tuple[Hole | Part, ...]


@attrs.frozen(eq=False, slots=False, repr=False)
class Rule:
    """Replace `pattern` by `replace` where `when` holds.

    `when` takes any of the wildcards by name: types for operands, values for static parameters.  Neither function may
    look at shapes: both are recorded without types when the pattern is prepared and when a chip filters the rules.
    """

    pattern: Callable[..., Any]
    replace: Callable[..., Any]
    when: Callable[..., bool] | None = None
    name: str = attrs.field(default=attrs.Factory(lambda self: self.pattern.__name__, takes_self=True))

    def __attrs_post_init__(self) -> None:
        known = set(_names(self.pattern))
        for other in (self.replace, self.when):
            strange = set(_names(other)) - known if other is not None else set()
            if strange:
                raise GraphError(f"rule {self.name!r}: {sorted(strange)} are no parameters of the pattern")

    @functools.cached_property
    def recorded(self) -> Pattern:
        """The pattern as equations between wildcards."""
        p = _record(self.pattern)
        if not p.eqns or any(isinstance(o, Hole) for o in p.outs):
            raise GraphError(f"rule {self.name!r}: a pattern returns results of its ops, never a wildcard")
        return p

    @functools.cached_property
    def introduced(self) -> tuple[Op, ...]:
        """Ops of the replacement that the pattern does not have."""
        had = {e.op for e in self.recorded.eqns}
        return tuple(dict.fromkeys(e.op for e in _record(self.replace).eqns if e.op not in had))

    def __repr__(self) -> str:
        return f"<rule {self.name}>"


def rewrite(g: Graph, rules: Sequence[Rule], chip: Chip | None = None) -> Graph:
    """Apply non-overlapping matches in program order, in one scan; at one equation the first rule wins.

    With a chip, a match is left alone if the replacement's new ops have no kernel there for these types.
    """
    by_op: dict[Op, list[Rule]] = defaultdict(list)
    for r in rules:
        by_op[r.recorded.eqns[-1].op].append(r)
    if not any(e.op in by_op for e in g.eqns):
        return g
    w = _Rewriter(g, chip)
    for i, e in enumerate(g.eqns):
        for r in by_op.get(e.op, ()):
            if i not in w.gone and w.apply(r, i):
                break
    return w.result()


@attrs.define(eq=False)
class _Match:
    """Equations of the graph for those of the pattern, and what the wildcards stand for."""

    eqns: dict[PatternEquation, int] = attrs.field(factory=dict)
    holes: dict[str, Var | None] = attrs.field(factory=dict)
    statics: dict[str, Any] = attrs.field(factory=dict)

    def copy(self) -> "_Match":
        return _Match(dict(self.eqns), dict(self.holes), dict(self.statics))


class _Rewriter:
    """The state of one scan.  `ready[v]` is the first position at which v may be read: a replacement at position p is
    emitted before equation p, after those accepted earlier for the same p."""

    def __init__(self, g: Graph, chip: Chip | None) -> None:
        self.g, self.chip = g, chip
        self.made: dict[Var, tuple[int, int]] = {v: (i, r) for i, e in enumerate(g.eqns) for r, v in enumerate(e.outs)}
        self.ready: dict[Var, int] = {v: i + 1 for v, (i, _) in self.made.items()}
        self.readers: dict[Var, list[int]] = defaultdict(list)
        for i, e in enumerate(g.eqns):
            for v in e.ins:
                if v is not None:
                    self.readers[v].append(i)
        self.results = set(g.outs)
        self.gone: set[int] = set()
        self.borrowed: dict[Var, list[int]] = defaultdict(list)     # positions of replacements that read a value
        self.inserted: dict[int, list[Equation]] = defaultdict(list)
        self.same: dict[Var, Var] = {}

    def apply(self, rule: Rule, last: int) -> bool:
        p = rule.recorded
        for m in self.matches(p, last):
            at = self.position(p, m)
            if at is not None and _holds(rule, m) and self.replace(rule, p, m, at):
                return True
        return False

    # ---- matching

    def matches(self, p: Pattern, last: int) -> Iterator[_Match]:
        m = _Match()
        if self.unify(p.eqns[-1], last, m):
            yield from self.complete(p, m)

    def complete(self, p: Pattern, m: _Match) -> Iterator[_Match]:
        """Find the equations that do not feed the last one, by way of a value that they share with the rest."""
        missing = next((e for e in reversed(p.eqns) if e not in m.eqns), None)
        if missing is None:
            yield m
            return
        for i in self.candidates(missing, m):
            trial = m.copy()
            if self.g.eqns[i].op is missing.op and self.unify(missing, i, trial):
                yield from self.complete(p, trial)

    def candidates(self, e: PatternEquation, m: _Match) -> list[int]:
        for x in e.ins:
            v = m.holes.get(x.name) if isinstance(x, Hole) else None
            if isinstance(x, Part) and x.eqn in m.eqns:
                v = self.g.eqns[m.eqns[x.eqn]].outs[x.index]
            if v is not None:
                return self.readers[v]
        return []

    def unify(self, e: PatternEquation, i: int, m: _Match) -> bool:
        found = self.g.eqns[i]
        if e in m.eqns:
            return m.eqns[e] == i
        if found.op is not e.op or i in self.gone or i in m.eqns.values():
            return False
        m.eqns[e] = i
        statics = zip(e.params, found.params, strict=True)
        operands = zip(e.ins, found.ins, strict=True)
        return (
            all(_unify_static(a, b, m.statics) for (_, a), (_, b) in statics)
            and all(self.unify_operand(x, v, m) for x, v in operands)
        )

    def unify_operand(self, x: Hole | Part | None, v: Var | None, m: _Match) -> bool:
        if x is None or v is None:
            return v is None and (x is None or (isinstance(x, Hole) and m.holes.setdefault(x.name, None) is None))
        if isinstance(x, Hole):
            return m.holes.setdefault(x.name, v) is v
        i, r = self.made.get(v, (-1, 0))
        return i >= 0 and r == x.index and self.unify(x.eqn, i, m)

    # ---- replacing

    def position(self, p: Pattern, m: _Match) -> int | None:
        """Where the replacement can stand: after all it reads, before all that reads it; None if nowhere."""
        inside = set(m.eqns.values())
        if any(v in self.made and self.made[v][0] in inside for v in m.holes.values() if v is not None):
            return None         # a wildcard stands for a value that the match itself makes
        outputs = {self.g.eqns[m.eqns[o.eqn]].outs[o.index] for o in p.outs if isinstance(o, Part)}
        at = max(inside)
        for i in inside:
            for v in self.g.eqns[i].outs:
                users = [j for j in self.readers[v] if j not in inside and j not in self.gone]
                if v not in outputs and (users or self.borrowed[v] or v in self.results):
                    return None
                at = min([at, *users, *(q - 1 for q in self.borrowed[v])])
        return at if all(v is None or self.ready.get(v, 0) <= at for v in m.holes.values()) else None

    def replace(self, rule: Rule, p: Pattern, m: _Match, at: int) -> bool:
        record = Record()
        origin = f"rule {rule.name}"
        given = {n: None if v is None else Traced(v, record, origin) for n, v in m.holes.items()} | m.statics
        try:
            with using(record):
                made = rule.replace(**{n: given[n] for n in _names(rule.replace)})
        except TypeRuleError as e:
            raise GraphError(f"rule {rule.name!r}: its replacement refuses what it matched; add a `when`.\n{e}") from e
        finally:
            record.open = False
        if record.consts:
            raise GraphError(f"rule {rule.name!r}: a replacement may not hold tensors of its own")
        old = [self.g.eqns[m.eqns[o.eqn]].outs[o.index] for o in p.outs if isinstance(o, Part)]
        new = [x.var for x in tree.leaves(made)]
        if [v.type for v in old] != [v.type for v in new]:
            raise GraphError(f"rule {rule.name!r} replaces {', '.join(str(v.type) for v in old)} "
                             f"by {', '.join(str(v.type) for v in new)}; add a `when`")
        if self.chip is not None and not _has_kernels(rule, record.eqns, self.chip):
            return False
        where = self.g.eqns[max(m.eqns.values())].where
        self.inserted[at] += [attrs.evolve(e, where=where) for e in record.eqns]
        self.gone.update(m.eqns.values())
        for v in m.holes.values():
            if v is not None:
                self.borrowed[v].append(at)
        for v, n in zip(old, new, strict=True):
            self.same[v] = n
            self.ready[v] = at
            self.made.pop(v, None)
        return True

    def result(self) -> Graph:
        if not self.gone:
            return self.g
        eqns: list[Equation] = []
        for i, e in enumerate(self.g.eqns):
            eqns += [self.renamed(x) for x in self.inserted[i]]
            if i not in self.gone:
                eqns.append(self.renamed(e))
        return attrs.evolve(self.g, eqns=tuple(eqns), outs=tuple(self.final(v) for v in self.g.outs))

    def renamed(self, e: Equation) -> Equation:
        return attrs.evolve(e, ins=tuple(None if v is None else self.final(v) for v in e.ins))

    def final(self, v: Var) -> Var:
        while v in self.same:
            v = self.same[v]
        return v


def _holds(rule: Rule, m: _Match) -> bool:
    if rule.when is None:
        return True
    known = {n: None if v is None else v.type for n, v in m.holes.items()} | m.statics
    return bool(rule.when(**{n: known[n] for n in _names(rule.when)}))


def _has_kernels(rule: Rule, eqns: Sequence[Equation], chip: Chip) -> bool:
    for e in eqns:
        if e.op in rule.introduced:
            try:
                k = choose(e.op, tuple(None if v is None else v.type for v in e.ins), e.params, chip)
            except NoKernel:
                return False
            if k.name == "reference":
                return False
    return True


def _unify_static(a: Any, b: Any, statics: dict[str, Any]) -> bool:
    if isinstance(a, Wild):
        if a.name not in statics:
            statics[a.name] = b
            return True
        a = statics[a.name]
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(_unify_static(x, y, statics) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


# ---- recording patterns ------------------------------------------------------------------------------------------


class _Unknown(Traced):
    """A value inside a pattern: takes part in op calls, has no type."""

    __slots__ = ("node",)

    def __init__(self, node: Hole | Part) -> None:
        self.node = node

    def to(self, dtype: Any) -> Any:
        return _OPERATORS["cast"](self, dtype=dtype)

    @property
    def shape(self) -> Any:
        raise TraceError("a rewrite pattern has no shapes; compare them in the rule's `when`")

    dtype = shape  # type: ignore[assignment]

    def _refuse(self, what: str, instead: str) -> str:
        return f"{what} is not possible in a rewrite pattern; call ops on its wildcards"

    def __repr__(self) -> str:
        return "Unknown()"


class _PatternRecord:
    """The interpreter that records a pattern."""

    def __init__(self) -> None:
        self.eqns: list[PatternEquation] = []

    def apply(self, op: Op, args: tuple[Any, ...], params: dict[str, Any]) -> Any:
        args, values = op.bind(args, params)
        if any(x is not None and not isinstance(x, _Unknown) for x in args):
            raise GraphError(f"{op.name} in a rewrite rule: operands are wildcards or results, never concrete values")
        e = PatternEquation(op, tuple(None if x is None else x.node for x in args), values)
        self.eqns.append(e)
        if op.single:
            return _Unknown(Part(e, 0))
        if op.results is None:
            raise GraphError(f"{op.name} does not declare how many results it has, so no rewrite rule can name it")
        return tuple(_Unknown(Part(e, r)) for r in range(len(op.results)))


def _record(fn: Callable[..., Any]) -> Pattern:
    record = _PatternRecord()
    given: dict[str, Any] = {}
    for p in inspect.signature(fn).parameters.values():
        given[p.name] = Wild(p.name) if p.kind is p.KEYWORD_ONLY else _Unknown(Hole(p.name))
    with using(record):
        out = fn(**given)
    return Pattern(tuple(record.eqns), tuple(x.node for x in tree.leaves(out)))


@functools.cache
def _names(fn: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(fn).parameters)
