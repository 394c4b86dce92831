"""A program that notes the time after every equation: the same lines with a call of the clock between them."""

import re
import types
from collections.abc import Callable
from typing import Any

import attrs

from afl.ir.graph import Equation, Graph
from afl.ir.program import BoundProgram

_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
CLOCK = "_clock"        # no name of a generated program starts with an underscore


def timed(bound: BoundProgram, mark: Callable[[], Any]) -> BoundProgram:
    """The same program and parameters; `mark` is called when it starts and after every equation, in their order.

    >>> import torch; from afl.chip import Chip
    >>> from afl.ir.program import compile_graph; from afl.ir.trace import trace
    >>> one, calls = torch.ones(2), []
    >>> graph = trace(lambda a, b: a + b, one, one)
    >>> bound = compile_graph(graph, Chip("any", allows_reference=True)).bind()
    >>> timed(bound, lambda: calls.append("mark"))(one, one), calls
    ((tensor([2., 2.]),), ['mark', 'mark'])
    """
    p = bound.program
    rows: list[str] = []
    lines: dict[int, int] = {}
    for n, row in enumerate(p.source.splitlines(), 1):
        rows.append(row)
        if n in p.lines:
            lines[len(rows)] = p.lines[n]
        if n == 1 or n in p.lines:
            rows.append(f"    {CLOCK}()")
    source = "\n".join(rows) + "\n"
    compiled = compile(source, p.code.co_filename, "exec")
    code = next(c for c in compiled.co_consts if isinstance(c, types.CodeType))
    space = {**bound.fn.__globals__, CLOCK: mark}
    program = attrs.evolve(p, source=source, code=code, lines=lines)
    return attrs.evolve(bound, program=program, fn=types.FunctionType(code, space, p.name))


def label(e: Equation, g: Graph) -> str:
    """An equation in a few words: its op, and the parameter that it reads, with "*" for the layer's number.

    "linear layers.*.qkv.w" is one name for the products of all layers with that matrix.
    """
    read = next((v.name for v in e.ins if v is not None and g.tags.get(v) == "param"), "")
    return f"{e.op.name} {_NUMBER.sub('*', read)}".strip()
