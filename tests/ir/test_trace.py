"""Tracing and its footguns: each surprising thing has a test that documents it."""

import pytest
import torch
from ir_toys import private, t32, toy_lookup, toy_sum, toy_until
from torch import Tensor

from afl import tree
from afl.chip import Chip
from afl.errors import CheckFailed, TraceError, TypeRuleError
from afl.ir.op import FLOAT, T
from afl.ir.trace import Checked, Eager, trace, using
from afl.types import HostInts, HostIntsType


def test_operators_and_methods_become_equations():
    def fn(a, b):
        return ((a + b) * 2.0 - a / b).reshape(6)[1:5:2], (a * b).to(torch.float64)

    g = trace(fn, t32(2, 3), t32(2, 3)).graph
    assert [e.op.name for e in g.eqns] == ["add", "scale", "div", "sub", "reshape", "getitem", "mul", "cast"]
    assert [str(v.type) for v in g.outs] == ["f32[2]", "f64[2,3]"]


def test_static_arguments_pass_through_and_structures_are_kept():
    def fn(p, x, *, twice):
        return {"y": x + p["w"] if twice else x, "n": None}

    t = trace(fn, {"w": t32(3)}, t32(3), tags=("param", "batch"), twice=True)
    assert len(t.graph.eqns) == 1 and t.result == tree.flatten({"y": 0, "n": None})[1]
    assert [t.graph.tags[v] for v in t.graph.ins] == ["param", "batch"]


def test_the_source_line_of_an_equation_is_that_of_the_model():
    g = trace(lambda x: toy_sum(x, None), t32(3)).graph
    assert g.eqns[0].where.startswith("test_trace.py:")


FOOTGUNS = {
    "a branch on a traced value": lambda x: x if x else x,
    "item": lambda x: x.item(),
    "iteration": lambda x: [y for y in x],
    r"\.softmax": lambda x: x.softmax(-1),
    "static slices and integers only": lambda x: x[x],
    "results are trees of tensors": lambda x: 3.0,
    "operands are tensors": lambda x: toy_sum(x, 3.0),
}


@pytest.mark.parametrize("text", FOOTGUNS)
def test_a_traced_value_refuses(text):
    with pytest.raises(TraceError, match=text):
        trace(FOOTGUNS[text], t32(3))


def test_a_refusal_names_where_the_value_comes_from_and_what_to_do():
    with pytest.raises(TraceError, match=r"comes from test_trace.py:\d+. Instead: pass the number as HostInts"):
        trace(lambda x: int(x + x), t32(3))


def test_a_value_used_after_its_trace_says_where_it_was_made():
    leaked = []
    trace(lambda x: leaked.append(x + x) or x, t32(3))
    with pytest.raises(TraceError, match="after its trace had ended"):
        leaked[0] + leaked[0]
    with pytest.raises(TraceError, match=r"after its trace had ended; it was made at test_trace.py:\d+"):
        trace(lambda x: x + leaked[0], t32(3))


def test_a_concrete_tensor_met_while_tracing_is_a_constant_of_the_graph():
    w = torch.ones(3)
    g = trace(lambda x: (x + w) * w, t32(3)).graph
    assert [g.tags.get(v) for v in g.ins] == [None, "const"] and list(g.consts.values()) == [w]


def test_an_inner_trace_that_fails_leaves_the_interpreter_as_it_was():
    with pytest.raises(TypeRuleError):
        trace(lambda a, b: a + b, t32(3), t32(4))
    assert torch.equal(toy_sum(torch.ones(2), None), torch.full((2,), 2.0))


def test_eager_execution_is_functional_unless_storage_is_donated():
    from ir_toys import TOY, toy_bump

    x, y = torch.ones(3), torch.ones(3)
    with using(Eager(TOY)):
        toy_bump(x, y)
    assert torch.equal(x, torch.ones(3))
    with using(Eager(TOY, donated=(x,))):
        toy_bump(x, y)
    assert not torch.equal(x, torch.ones(3))


def test_eager_copies_an_operand_that_the_same_op_still_reads():
    from ir_toys import TOY, toy_bump

    x = torch.ones(3)
    with using(Eager(TOY, donated=(x,))):
        y = toy_bump(x, x)
    assert torch.allclose(y, torch.full((3,), 2.2)) and torch.equal(x, torch.ones(3))


def test_checked_mode_never_clamps_an_index():
    table, i = torch.ones(4, 2), torch.tensor([0, 4], dtype=torch.int32)
    plain = Chip("plain", allows_reference=True)
    with using(Eager(plain)):
        toy_lookup(table, i)                                # this reference clamps, which is what checked mode is for
    with using(Checked(plain)), pytest.raises(CheckFailed, match="operand 'i' holds index 4, allowed are 0 to 3"):
        toy_lookup(table, i)
    with using(Checked(plain)), pytest.raises(CheckFailed, match="holds index -1"):
        toy_lookup(table, torch.tensor([-1], dtype=torch.int32))


def test_checked_mode_finds_nan_and_results_of_another_type():
    @private
    def toy_liar(x: T[Tensor, "n", FLOAT]) -> T[Tensor, "n", "x"]:
        return x.double()

    plain = Chip("plain", allows_reference=True)
    with using(Checked(plain)):
        with pytest.raises(CheckFailed, match="holds NaN"):
            toy_sum(torch.tensor([float("nan")]), None)
        with pytest.raises(CheckFailed, match="its rule says"):
            toy_liar(torch.ones(2))


def test_lengths_are_inputs_and_never_constants():
    g = trace(toy_until, t32(2, 5), HostIntsType(2)).graph
    assert g.consts == {} and str(g.ins[1].type) == "host[2]"


def test_host_vectors_copy_the_callers_buffer():
    import numpy as np

    mine = np.array([1, 2], dtype=np.int32)
    kept = HostInts(mine)
    mine[:] = 7
    assert kept.list == [1, 2] and kept.tensor.tolist() == [1, 2]
    with pytest.raises(ValueError):
        kept.array[0] = 3
