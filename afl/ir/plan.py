"""In-place planning: which kernel runs each equation, what it may overwrite, what must be copied, what it all weighs.

The one idea is the storage class: values that may share memory.  A view joins the class of its operand, and so does
a result that a kernel writes in place.  An overwrite is allowed only where nobody can still read the old bytes;
elsewhere the operand is copied first.  Results of the graph own their storage: none shares it with another result or
with an input that the caller keeps.  A plan is a value; nothing here runs a kernel.
"""

from collections.abc import Callable, Iterable, Mapping

import attrs

from afl.chip import Chip
from afl.errors import GraphError
from afl.ir.graph import Equation, Graph, Var, line, numbering, uses
from afl.ir.kernel import Kernel, choose, reference
from afl.types import TensorType


@attrs.frozen
class Copy:
    """Operand `place` of equation `at` is copied first; at == len(eqns): result `place` is copied on return."""

    at: int
    place: int


@attrs.frozen(eq=False, repr=False)
class Plan:
    """How a graph runs on a chip.  `last` counts results of the graph as read at len(eqns)."""

    graph: Graph
    kernels: tuple[Kernel, ...]
    copies: tuple[Copy, ...]
    overwrites: tuple[tuple[int, int], ...]     # (equation, operand) that is written in place without a copy
    last: Mapping[Var, int]
    classes: Mapping[Var, int]                  # storage class of every value
    outputs: tuple[int, ...]                    # storage class of every result, after copies
    kept: frozenset[int]                        # classes that must not be written: inputs that are not donated
    given: Mapping[int, Var]                    # class -> donated input
    peak: int                                   # most bytes alive beside the inputs, with kernel workspace

    def __repr__(self) -> str:
        copied = sum(_copied(self, c) for c in self.copies)
        return (
            f"Plan({len(self.kernels)} equations, {len(self.overwrites)} written in place, "
            f"{len(self.copies)} copies of {copied} bytes, peak {self.peak} bytes)"
        )


def plan(graph: Graph, chip: Chip, *, donate: Iterable[Var | str] = (), references: bool = False) -> Plan:
    """Choose kernels and decide copies.  `donate` holds inputs, or tags of inputs, whose storage may be overwritten.

    >>> import torch; from afl.chip import Chip; from afl.ir.trace import trace; from afl.types import TensorType
    >>> from afl.ops.basic import add
    >>> g = trace(lambda a, b: a + b, *[TensorType((2,), torch.float32)] * 2).graph
    >>> plan(g, Chip("any", allows_reference=True))
    Plan(1 equations, 0 written in place, 0 copies of 0 bytes, peak 8 bytes)
    """
    donated = _donated(graph, donate)
    kernels = tuple(_kernel(e, chip, references) for e in graph.eqns)
    last = uses(graph)
    end_of_graph = len(graph.eqns)
    classes: dict[Var, int] = {}
    born: list[int] = []            # per class: equation that makes it, −1 for inputs
    ends: list[int] = []            # per class: last read of any member so far
    sizes: list[int] = []
    kept: set[int] = set()
    given: dict[int, Var] = {}
    copies: list[Copy] = []
    overwrites: list[tuple[int, int]] = []

    def fresh(v: Var, at: int) -> int:
        born.append(at)
        ends.append(at)
        sizes.append(v.type.nbytes if isinstance(v.type, TensorType) else 0)
        return len(born) - 1

    for v in graph.ins:
        c = classes[v] = fresh(v, -1)
        ends[c] = last.get(v, -1)
        if v in donated:
            given[c] = v
        else:
            kept.add(c)

    for i, (e, k) in enumerate(zip(graph.eqns, kernels, strict=True)):
        here = [None if v is None else classes[v] for v in e.ins]   # class of each operand as the kernel will see it
        for j in _written(e, k):
            v, c = e.ins[j], here[j]
            if v is None or c is None:
                continue
            if c in kept or here.count(c) > 1 or ends[c] > i:
                copies.append(Copy(i, j))
                here[j] = fresh(v, i)
            else:
                overwrites.append((i, j))
        for r, out in enumerate(e.outs):
            j = _source(e, k, r)
            c = None if j is None else here[j]
            if c is None:
                c = fresh(out, i)
            elif r in k.inplace and out.type != e.ins[j].type:  # type: ignore[index, union-attr]
                raise GraphError(f"{k!r} writes result {r} ({out.type}) in place of an operand of another type:\n"
                                 f"  {line(e, numbering(graph))}")
            classes[out] = c
            ends[c] = max(ends[c], last.get(out, i))

    outputs = _own_outputs(graph, classes, kept, copies, fresh)
    for c in outputs:
        ends[c] = end_of_graph
    peak = _peak(graph, kernels, born, ends, sizes)
    return Plan(graph, kernels, tuple(copies), tuple(overwrites), last, classes, outputs, frozenset(kept), given, peak)


def peak_bytes(p: Plan) -> int:
    """Most bytes that the program holds at a time beside its inputs (parameters, state, batch), workspace included."""
    return p.peak


def input_bytes(p: Plan, tag: str | None = None) -> int:
    """Bytes of the inputs with that tag, or of all."""
    chosen = [v.type for v in p.graph.ins if tag is None or p.graph.tags.get(v) == tag]
    return sum(t.nbytes for t in chosen if isinstance(t, TensorType))


def capture_problems(p: Plan) -> list[str]:
    """Why this plan cannot be captured and replayed at fixed addresses; empty if it can."""
    n = numbering(p.graph)
    pairs = list(zip(p.graph.eqns, p.kernels, strict=True))
    rows = [f"{k!r} is not capturable: {line(e, n)}" for e, k in pairs if not k.capturable]
    rows += [f"{k!r} takes host operands ({', '.join(k.host)}) and declares no update, so a replay would use those of "
             f"the capture: {line(e, n)}" for e, k in pairs if k.capturable and k.host and k.update is None]
    rows += [
        f"a donated input is copied before it is written: {line(p.graph.eqns[c.at], n)}"
        for c in p.copies
        if c.at < len(p.graph.eqns) and p.classes[_operand(p, c)] in p.given
    ]
    rows += [f"donated input {n[v]} {v.name} ends in no result" for c, v in p.given.items() if c not in p.outputs]
    return rows


def _kernel(e: Equation, chip: Chip, references: bool) -> Kernel:
    types = tuple(None if v is None else v.type for v in e.ins)
    return reference(e.op, types) if references else choose(e.op, types, e.params, chip)


def _donated(graph: Graph, donate: Iterable[Var | str]) -> set[Var]:
    out: set[Var] = set()
    for d in donate:
        found = {v for v in graph.ins if graph.tags.get(v) == d} if isinstance(d, str) else {d} & set(graph.ins)
        if not found:
            raise GraphError(f"{d!r} is donated but is no input of the graph")
        bound = [v for v in found if graph.tags.get(v) in ("param", "const")]
        if bound:
            raise GraphError(f"{bound[0]} is a {graph.tags[bound[0]]}: it stays bound and cannot be donated")
        out |= found
    return out


def _written(e: Equation, k: Kernel) -> list[int]:
    """Positions of the operands that the kernel overwrites, each once."""
    if not k.inplace:
        return []
    at = {o.name: j for j, o in enumerate(e.op.operands)}
    return [at[name] for name in dict.fromkeys(k.inplace.values())]


def _source(e: Equation, k: Kernel, result: int) -> int | None:
    """Position of the operand whose storage the result has, if any."""
    name = k.inplace.get(result, e.op.view_of)
    return None if name is None else next(j for j, o in enumerate(e.op.operands) if o.name == name)


def _own_outputs(
    graph: Graph, classes: Mapping[Var, int], kept: set[int], copies: list[Copy], fresh: Callable[[Var, int], int]
) -> tuple[int, ...]:
    """Give every result a class of its own; of several in one class the largest keeps it, so a cache is not copied."""
    owner: dict[int, int] = {}
    for j, v in enumerate(graph.outs):
        if isinstance(v.type, TensorType) and classes[v] not in kept:
            i = owner.setdefault(classes[v], j)
            if v.type.nbytes > graph.outs[i].type.nbytes:  # type: ignore[union-attr]
                owner[classes[v]] = j
    out = []
    for j, v in enumerate(graph.outs):
        if isinstance(v.type, TensorType) and owner.get(classes[v]) != j:
            copies.append(Copy(len(graph.eqns), j))
            out.append(fresh(v, len(graph.eqns)))
        else:
            out.append(classes[v])
    return tuple(out)


def _peak(graph: Graph, kernels: tuple[Kernel, ...], born: list[int], ends: list[int], sizes: list[int]) -> int:
    steps = len(graph.eqns) + 1
    change = [0] * (steps + 1)
    for at, end, size in zip(born, ends, sizes, strict=True):
        if at >= 0:
            change[at] += size
            change[end + 1] -= size
    now = most = 0
    for i in range(steps):
        now += change[i]
        most = max(most, now + (_workspace(graph.eqns[i], kernels[i]) if i < len(graph.eqns) else 0))
    return most


def _workspace(e: Equation, k: Kernel) -> int:
    if k.workspace is None:
        return 0
    return k.workspace(*(None if v is None else v.type for v in e.ins), **dict(e.params))


def _operand(p: Plan, c: Copy) -> Var:
    v = p.graph.outs[c.place] if c.at == len(p.graph.eqns) else p.graph.eqns[c.at].ins[c.place]
    assert v is not None, "an absent operand is never copied"
    return v


def _copied(p: Plan, c: Copy) -> int:
    t = _operand(p, c).type
    return t.nbytes if isinstance(t, TensorType) else 0
