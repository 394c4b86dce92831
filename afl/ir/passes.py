"""Passes over graphs: dead code, common sub-expressions, collectives over one rank, and which rules a chip can use.

Each takes a graph and returns a new one with the same inputs and the same meaning.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from afl.chip import Chip
from afl.ir.graph import Equation, Graph, Var
from afl.ir.op import Op
from afl.ir.rewrite import Rule


def dce(g: Graph) -> Graph:
    """Drop pure equations none of whose results is used.  Communication stays: other ranks wait for it."""
    live = set(g.outs)
    kept: list[Equation] = []
    for e in reversed(g.eqns):
        if e.op.effect is not None or any(v in live for v in e.outs):
            kept.append(e)
            live.update(v for v in e.ins if v is not None)
    return g if len(kept) == len(g.eqns) else attrs.evolve(g, eqns=tuple(reversed(kept)))


def cse(g: Graph) -> Graph:
    """Compute equal pure equations once.  Communication is never merged."""
    same: dict[Var, Var] = {}
    seen: dict[Any, Equation] = {}
    eqns: list[Equation] = []
    for e in g.eqns:
        e = _renamed(e, same)
        if e.op.effect is not None:
            eqns.append(e)
            continue
        first = seen.setdefault((e.op, e.ins, exact(e.params)), e)
        if first is e:
            eqns.append(e)
        else:
            same.update(zip(e.outs, first.outs, strict=True))
    return g if not same else attrs.evolve(g, eqns=tuple(eqns), outs=tuple(same.get(v, v) for v in g.outs))


def drop_unit_collectives(g: Graph, mesh_axes: Mapping[str, int]) -> Graph:
    """Replace communication over axes of size 1 by its operand.  Axes that the mesh lacks have size 1."""
    same: dict[Var, Var] = {}
    eqns: list[Equation] = []
    for e in g.eqns:
        e = _renamed(e, same)
        if e.op.effect == "comm" and _is_unit(e, mesh_axes):
            assert e.ins[0] is not None
            same[e.outs[0]] = e.ins[0]
        else:
            eqns.append(e)
    return g if not same else attrs.evolve(g, eqns=tuple(eqns), outs=tuple(same.get(v, v) for v in g.outs))


def usable(rules: Iterable[Rule], chip: Chip) -> tuple[Rule, ...]:
    """The rules whose replacement brings in only ops for which the chip has a kernel of its own."""
    return tuple(r for r in rules if all(has_kernel(op, chip) for op in r.introduced))


def has_kernel(op: Op, chip: Chip) -> bool:
    """True if some kernel of the op, its reference body aside, runs on the chip."""
    return any(k.needs <= chip.features for k in op.kernels)


def exact(v: Any) -> Any:
    """A key that is equal only for equal values of equal type: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if type(v) is tuple:
        return (tuple, *map(exact, v))
    return (float, repr(v)) if type(v) is float else (type(v), v)


def _renamed(e: Equation, same: Mapping[Var, Var]) -> Equation:
    if not same or not any(v in same for v in e.ins):
        return e
    return attrs.evolve(e, ins=tuple(v if v is None else same.get(v, v) for v in e.ins))


def _is_unit(e: Equation, mesh_axes: Mapping[str, int]) -> bool:
    axis: Any = dict(e.params).get("axis")
    names = axis if isinstance(axis, tuple) else (axis,)
    if axis is None or any(mesh_axes.get(n, 1) != 1 for n in names):
        return False
    return len(e.outs) == 1 and bool(e.ins) and e.ins[0] is not None and e.ins[0].type == e.outs[0].type
