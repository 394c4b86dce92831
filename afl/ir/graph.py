"""The IR: an immutable graph of equations in single assignment form, its printer and its checker."""

import html
from collections.abc import Mapping
from typing import Any

import attrs

from afl.errors import GraphError, TypeRuleError
from afl.ir.op import Op, Params
from afl.types import HostIntsType, TensorType, Type


@attrs.frozen(eq=False)
class Var:
    """A value of the graph.  Compared by identity; `name` is only for reading."""

    type: Type
    name: str = ""

    def __repr__(self) -> str:
        return f"Var({self.name or hex(id(self))}:{self.type})"


@attrs.frozen(eq=False)
class Equation:
    """outs = op(ins, **params).  `ins` holds None for an absent optional operand; `where` is "file:line"."""

    op: Op
    ins: tuple[Var | None, ...]
    params: Params
    outs: tuple[Var, ...]
    where: str = ""


@attrs.frozen(eq=False)
class Graph:
    """A pure-tensor program.  `tags` say what an input is: "param", "state", "batch" or "const"."""

    ins: tuple[Var, ...]
    eqns: tuple[Equation, ...]
    outs: tuple[Var, ...]
    tags: Mapping[Var, str] = attrs.field(factory=dict)
    consts: Mapping[Var, Any] = attrs.field(factory=dict)   # inputs whose value is known: tensors met while tracing

    def __str__(self) -> str:
        return show(self)

    def __repr__(self) -> str:
        text = show(self).splitlines()
        return "\n".join(text if len(text) <= 20 else [*text[:10], f"  ... {len(text) - 15} more", *text[-5:]])

    def _repr_html_(self) -> str:
        return show_html(self)


FEW = 16  # a graph with more inputs calls them by their names and counts parameters and state in its header


def numbering(g: Graph) -> dict[Var, str]:
    """Names of all values: %0, %1, ... in order of definition; inputs of a large graph keep their own names."""
    named: dict[str, int] = {}
    for v in g.ins if len(g.ins) > FEW else ():
        named[v.name] = named.get(v.name, 0) + 1
    names: dict[Var, str] = {}
    for v in g.ins:
        names[v] = v.name if v.name and named.get(v.name) == 1 else f"%{len(names)}"
    given = sum(not x.startswith("%") for x in names.values())
    for e in g.eqns:
        for v in e.outs:
            names.setdefault(v, f"%{len(names) - given}")
    return names


def show(g: Graph, where: bool = False) -> str:
    """The graph as text, one equation per line; also the format of golden tests."""
    n = numbering(g)
    rows = _header(g, n)
    rows += ["  " + line(e, n) + (f"    # {e.where}" if where and e.where else "") for e in g.eqns]
    rows.append("  return " + " ".join(n.get(v, "?") for v in g.outs))
    return "\n".join(rows)


def _header(g: Graph, n: Mapping[Var, str]) -> list[str]:
    """All inputs in one line; of many, those with the tags param, state and const are only counted."""
    shown = [v for v in g.ins if len(g.ins) <= FEW or g.tags.get(v) not in ("param", "state", "const")]
    rows = []
    for tag in ("param", "state", "const"):
        some = [v for v in g.ins if v not in shown and g.tags.get(v) == tag]
        if some:
            size = sum(v.type.nbytes for v in some if isinstance(v.type, TensorType))
            rows.append(f"  # {tag}: {len(some)} values, {size / 1e6:.1f} MB; {n[some[0]]}:{some[0].type}, ...")
    return ["graph(" + " ".join(f"{n[v]}:{v.type}" for v in shown) + ")", *rows]


def line(e: Equation, n: Mapping[Var, str]) -> str:
    """One equation as text."""
    outs = " ".join(f"{n.get(v, '?')}:{v.type}" for v in e.outs)
    ins = "".join(f" {n.get(v, '?') if v is not None else '-'}" for v in e.ins)
    params = f" {{{', '.join(f'{k}={_short(v)}' for k, v in e.params)}}}" if e.params else ""
    return f"{outs} = {e.op.name}{ins}{params}"


def _short(v: Any) -> str:
    text = repr(v) if not isinstance(v, str) else v
    return text if len(text) <= 60 else f"{text[:57]}..."


_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756", "#72b7b2", "#bab0ac")


def show_html(g: Graph) -> str:
    """A table for notebooks: result, op, operands, source.  All text is escaped."""
    n = numbering(g)
    ops = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(dict.fromkeys(e.op.name for e in g.eqns))}
    rows = []
    for e in g.eqns:
        outs = ", ".join(f"{n[v]}&thinsp;<small>{html.escape(str(v.type))}</small>" for v in e.outs)
        ins = ", ".join(_operand_html(v, n) for v in e.ins)
        params = html.escape(", ".join(f"{k}={_short(v)}" for k, v in e.params))
        cell = f"<b style='color:{ops[e.op.name]}'>{html.escape(e.op.name)}</b>"
        rows.append(
            f"<tr><td>{outs}</td><td>{cell}</td><td>{ins}</td>"
            f"<td><small>{params}</small></td><td><small>{html.escape(e.where)}</small></td></tr>"
        )
    head = "<tr><th>result</th><th>op</th><th>operands</th><th>parameters</th><th>source</th></tr>"
    title = f"{len(g.ins)} inputs, {len(g.eqns)} equations, {len(g.outs)} results"
    table = f"<table style='text-align:left'>{head}{''.join(rows)}</table>"
    return f"<details open><summary>{title}</summary>{table}</details>"


def _operand_html(v: Var | None, n: Mapping[Var, str]) -> str:
    if v is None:
        return "-"
    return html.escape(v.name) if v.name else n[v]


def show_dot(g: Graph) -> str:
    """The graph in the language of graphviz; parameters are left out, since every layer has a dozen."""
    n = numbering(g)
    hidden = {v for v in g.ins if g.tags.get(v) in ("param", "const")}
    rows = ["digraph afl {", "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=10];"]
    made: dict[Var, str] = {}
    for v in g.ins:
        if v not in hidden:
            made[v] = f"in{len(made)}"
            rows.append(f"  {made[v]} [label={_quote(f'{v.name or n[v]} {v.type}')}, shape=ellipse];")
    for i, e in enumerate(g.eqns):
        rows.append(f"  e{i} [label={_quote(e.op.name)}];")
        for v in e.ins:
            if v is not None and v in made:
                rows.append(f"  {made[v]} -> e{i} [label={_quote(str(v.type))}, fontsize=8];")
        made.update(dict.fromkeys(e.outs, f"e{i}"))
    for i, v in enumerate(g.outs):
        rows.append(f"  out{i} [label={_quote(str(v.type))}, shape=ellipse];")
        if v in made:
            rows.append(f"  {made[v]} -> out{i};")
    return "\n".join([*rows, "}"])


def _quote(s: str) -> str:
    return '"' + s.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def check(g: Graph) -> None:
    """Raise GraphError unless the graph is well formed; the offending equation is shown with its neighbours.

    Single assignment, defined before use, types equal to the rule's, hashable parameters, host vectors only where the
    op takes them, communication in one total order (program order) per axis.
    """
    defined: set[Var] = set()
    for v in g.ins:
        if v in defined:
            raise GraphError(f"input {v} appears twice")
        defined.add(v)
    for i, e in enumerate(g.eqns):
        problem = _problem(e, defined)
        if problem:
            raise GraphError(f"equation {i}: {problem}\n{_neighbours(g, i)}")
        defined.update(e.outs)
    for j, v in enumerate(g.outs):
        if v not in defined:
            raise GraphError(f"result {j} ({v}) is never defined")


def _problem(e: Equation, defined: set[Var]) -> str | None:
    if len(e.ins) != len(e.op.operands):
        return f"{e.op.name} has {len(e.op.operands)} operands, the equation {len(e.ins)}"
    for v, o in zip(e.ins, e.op.operands, strict=True):
        if v is None:
            if not o.optional:
                return f"operand {o.name!r} is absent but not optional"
            continue
        if v not in defined:
            return f"operand {o.name!r} is used before it is defined"
        if isinstance(v.type, HostIntsType) != o.host:
            return f"operand {o.name!r} mixes up host vectors and tensors"
    try:
        types = e.op.infer(tuple(v.type if v is not None else None for v in e.ins), e.params)
    except TypeRuleError as err:
        return str(err)
    if len(types) != len(e.outs):
        return f"the rule gives {len(types)} results, the equation has {len(e.outs)}"
    for j, (t, v) in enumerate(zip(types, e.outs, strict=True)):
        if v in defined or e.outs.index(v) != j:
            return f"result {j} is assigned twice"
        if t != v.type:
            return f"result {j} is {v.type}, the rule says {t}"
    return None


def _neighbours(g: Graph, i: int) -> str:
    n = numbering(g)
    lo = max(0, i - 5)
    return "\n".join(f"{'>' if j == i else ' '} {line(g.eqns[j], n)}" for j in range(lo, min(len(g.eqns), i + 6)))


def uses(g: Graph) -> dict[Var, int]:
    """Index of the last equation that reads each value; results of the graph count as read at the end."""
    last: dict[Var, int] = {}
    for i, e in enumerate(g.eqns):
        for v in e.ins:
            if v is not None:
                last[v] = i
    for v in g.outs:
        last[v] = len(g.eqns)
    return last


def tensor_types(g: Graph) -> list[TensorType]:
    """Types of all tensor values, inputs first."""
    values = [*g.ins, *(v for e in g.eqns for v in e.outs)]
    return [v.type for v in values if isinstance(v.type, TensorType)]
