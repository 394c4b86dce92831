"""The graph as text, HTML and dot, and the mutations that its checker must catch."""

import re

import attrs
import pytest
from ir_toys import t32, toy_all_reduce, toy_bump, toy_lookup, toy_pair, toy_sum, toy_until, toy_write

from afl.errors import GraphError
from afl.ir.graph import Equation, Graph, Var, check, show, show_dot, show_html, tensor_types, uses
from afl.ir.trace import trace
from afl.types import HostIntsType, TensorType


def model(params, state, x, n):
    c = toy_write(state, x, at=1)
    a, b = toy_pair(x, params)
    h = toy_all_reduce(toy_sum(a, None) * 0.5, axis="tp")
    return c, h + b, toy_until(c, n)


def traced():
    return trace(model, t32(3), t32(2, 3), t32(3), HostIntsType(2), tags=("param", "state", "batch", "batch")).graph


def test_graphs_print_as_text_dot_and_html(golden):
    g = traced()
    check(g)
    with_lines = re.sub(r"test_graph.py:\d+", "model.py:7", show(g, where=True))
    golden("ir_graph", f"{g}\n\n{with_lines}\n\n{show_dot(g)}")


def test_html_escapes_what_comes_from_outside():
    g = trace(lambda x: x + x, {"<script>": t32(3)}["<script>"]).graph
    g = attrs.evolve(g, eqns=tuple(attrs.evolve(e, where="<b>evil</b>") for e in g.eqns))
    assert "<b>evil" not in show_html(g) and "&lt;b&gt;evil" in g._repr_html_()


def test_a_long_graph_has_a_short_repr():
    def chain(x):
        for _ in range(50):
            x = x + x
        return x

    g = trace(chain, t32(3)).graph
    assert len(repr(g).splitlines()) <= 20 and len(str(g).splitlines()) == 52
    assert len(tensor_types(g)) == 51 and uses(g)[g.outs[0]] == 50


def swap(g, i, **changes):
    eqns = list(g.eqns)
    eqns[i] = attrs.evolve(eqns[i], **changes)
    return attrs.evolve(g, eqns=tuple(eqns))


MUTATIONS = {
    "appears twice": lambda g: attrs.evolve(g, ins=(*g.ins, g.ins[0])),
    "used before it is defined": lambda g: attrs.evolve(g, eqns=tuple(reversed(g.eqns))),
    "never defined": lambda g: attrs.evolve(g, outs=(Var(t32(3)),)),
    "has 2 operands, the equation 1": lambda g: swap(g, 1, ins=g.eqns[1].ins[:1]),
    "absent but not optional": lambda g: swap(g, 1, ins=(None, g.eqns[1].ins[1])),
    "mixes up host vectors": lambda g: swap(g, 1, ins=(g.ins[3], g.eqns[1].ins[1])),
    "assigned twice": lambda g: swap(g, 1, outs=(g.eqns[1].outs[0],) * 2),
    "the rule says": lambda g: swap(g, 1, outs=(Var(t32(4)), g.eqns[1].outs[1])),
    "the rule gives 2 results": lambda g: swap(g, 1, outs=g.eqns[1].outs[:1]),
    "must be hashable": lambda g: swap(g, 0, params=(("at", [1]),)),
    "dimension": lambda g: swap(g, 0, ins=(g.ins[1], g.ins[1])),
}


@pytest.mark.parametrize("text", MUTATIONS)
def test_the_checker_catches(text):
    with pytest.raises(GraphError, match=text):
        check(MUTATIONS[text](traced()))


def test_a_redefinition_of_an_input_is_caught_and_shown_with_its_neighbours():
    x = Var(t32(3), "x")
    g = Graph((x,), (Equation(toy_bump, (x, x), (), (x,)),), (x,))
    with pytest.raises(GraphError, match="equation 0: result 0 is assigned twice") as e:
        check(g)
    assert "> " in str(e.value) and "toy_bump" in str(e.value)


def test_index_ranges_are_part_of_the_op_not_of_the_graph():
    import torch

    g = trace(toy_lookup, t32(5, 2), TensorType((3,), torch.int32)).graph
    check(g)
    assert g.eqns[0].op.operands[1].index.limit == "v"
