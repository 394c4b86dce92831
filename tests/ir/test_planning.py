"""The in-place planner against brute force: random graphs with views, in-place kernels, aliases and mixed donation."""

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_toys import (
    PLAIN,
    TOY,
    private,
    t32,
    toy_both,
    toy_bump,
    toy_half,
    toy_last,
    toy_pair,
    toy_row,
    toy_sum,
    toy_write,
)
from torch import Tensor

from afl.errors import GraphError
from afl.ir.graph import Equation, Graph, Var, check
from afl.ir.kernel import kernel
from afl.ir.op import FLOAT, T
from afl.ir.passes import dce
from afl.ir.plan import Copy, capture_problems, input_bytes, peak_bytes, plan
from afl.ir.program import generate
from afl.ir.trace import trace
from afl.types import TensorType

F64 = torch.float64
SHAPES = ((4,), (2,), (4, 2), (2, 2))
WRITERS = (toy_bump, toy_pair, toy_both, toy_last)


@st.composite
def graphs(draw, views=True):
    """A random graph and the inputs that are donated."""
    shapes = SHAPES if views else SHAPES[:1]
    ins = [Var(TensorType(draw(st.sampled_from(shapes)), F64), f"x{i}") for i in range(draw(st.integers(1, 4)))]
    values, eqns = list(ins), []
    pick = lambda xs: xs[draw(st.integers(0, len(xs) - 1))]                      # noqa: E731
    for _ in range(draw(st.integers(1, 12))):
        x = pick(values[-6:])
        alike = [v for v in values if v.type == x.type]
        rows = [v for v in values if v.type.shape == x.type.shape[1:]] if views else []
        kinds = [*WRITERS, *WRITERS, toy_sum]
        if views:
            kinds += [toy_half] * 3 * (x.type.shape[0] == 4) + [toy_row] * 3 * (len(x.type.shape) == 2)
            kinds += [toy_write] * 4 * bool(rows)
        op, operands, params = pick(kinds), (x,), ()
        if op is toy_half:
            params = (("second", draw(st.booleans())),)
        elif op is toy_row:
            params = (("at", draw(st.integers(0, 1))),)
        elif op is toy_write:
            operands, params = (x, pick(rows)), (("at", draw(st.integers(0, 1))),)
        else:
            y = pick([*alike, None] if op is toy_sum else alike)
            operands = (y, x) if y is not None and draw(st.booleans()) else (x, y)
        types = op.infer(tuple(None if v is None else v.type for v in operands), params)
        outs = tuple(Var(t) for t in types)
        eqns.append(Equation(op, operands, params, outs))
        values.extend(outs)
    results = draw(st.lists(st.sampled_from(values), min_size=1, max_size=5))
    donated = [v for v in ins if draw(st.booleans())]
    return Graph(tuple(ins), tuple(eqns), tuple(results)), donated


def inputs_for(g):
    gen = torch.Generator().manual_seed(0)
    return [torch.rand(v.type.shape, dtype=F64, generator=gen) + 0.5 for v in g.ins]


def run_reference(g, inputs):
    """Every op by its body, on its own copies: nothing can be overwritten."""
    env = {v: x.clone() for v, x in zip(g.ins, inputs, strict=True)}
    for e in g.eqns:
        out = e.op.reference(*(None if v is None else env[v].clone() for v in e.ins), **dict(e.params))
        env.update(zip(e.outs, out if isinstance(out, tuple) else (out,), strict=True))
    return [env[v] for v in g.outs]


def violation(p, donated):
    """What is wrong with running this plan, or None."""
    g = p.graph
    inputs = inputs_for(g)
    want = run_reference(g, inputs)
    given_ = [x.clone() for x in inputs]
    got = generate(p).bind()(*given_)
    if not all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-9) for a, b in zip(got, want, strict=True)):
        return "a result is wrong"
    kept = [(x, y) for v, x, y in zip(g.ins, inputs, given_, strict=True) if v not in donated]
    if not all(torch.equal(x, y) for x, y in kept):
        return "a kept input was changed"
    for j, x in enumerate(got):
        x.fill_(1000.0 + j)
    if not all(bool((x == 1000.0 + j).all()) for j, x in enumerate(got)):
        return "two results share storage"
    if not all(torch.equal(x, y) for x, y in kept):
        return "a result shares storage with a kept input"
    return None


def measured_peak(p):
    """Run the plan step by step and count the bytes of the distinct storages alive, inputs aside."""
    g, end = p.graph, len(p.graph.eqns)
    env = {v: x.clone() for v, x in zip(g.ins, inputs_for(g), strict=True)}
    given_ = {x.untyped_storage().data_ptr() for x in env.values()}
    outside = list(env.values())
    most = 0

    def alive(tensors):
        found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x is not None}
        return sum(n for at, n in found.items() if at not in given_)

    for i, (e, k) in enumerate(zip(g.eqns, p.kernels, strict=True)):
        args = [v and (env[v].clone() if Copy(i, j) in p.copies else env[v]) for j, v in enumerate(e.ins)]
        out = k.fn(*args, **dict(e.params))
        env.update(zip(e.outs, out if isinstance(out, tuple) else (out,), strict=True))
        extra = k.workspace(*(v and v.type for v in e.ins), **dict(e.params)) if k.workspace else 0
        most = max(most, alive([*env.values(), *args]) + extra)
        env = {v: x for v, x in env.items() if p.last.get(v, -1) > i}
    assert outside
    return max(most, alive([env[v].clone() if Copy(end, j) in p.copies else env[v] for j, v in enumerate(g.outs)]))


def holds(g, donated):
    check(g)
    p = plan(g, TOY, donate=donated)
    assert violation(p, donated) is None
    assert peak_bytes(p) == measured_peak(p)
    assert len(set(p.outputs)) == len(p.outputs) and not p.kept & set(p.outputs)


RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=1000, deadline=None, suppress_health_check=RELAXED)
@given(graphs())
def test_planned_programs_equal_references_and_leave_kept_inputs_alone(case):
    holds(*case)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None, suppress_health_check=RELAXED)
@given(graphs())
def test_planned_programs_equal_references_on_ten_thousand_graphs(case):
    holds(*case)


@settings(max_examples=200, deadline=None, suppress_health_check=RELAXED)
@given(graphs(views=False))
def test_without_views_every_copy_is_needed(case):
    g, donated = case
    g = dce(g)
    p = plan(g, TOY, donate=donated)
    for c in p.copies:
        assert violation(attrs.evolve(p, copies=tuple(x for x in p.copies if x != c)), donated) is not None


# ---- the worked example, and the traps one by one ----------------------------------------------------------------


def writes(both=False):
    """c1 = write(c0, k0); o = use(c1); c2 = write(c1, k1)."""

    def fn(c0, k0, k1):
        c1 = toy_write(c0, k0, at=0)
        o = toy_sum(c1, c1)
        c2 = toy_write(c1, k1, at=1)
        return (o, c2, c1) if both else (o, c2)

    g = trace(fn, t32(4, 2), t32(2), t32(2)).graph
    return g, g.ins[:1]


def test_a_chain_of_writes_into_a_donated_cache_copies_nothing():
    g, c0 = writes()
    p = plan(g, TOY, donate=c0)
    assert p.copies == () and p.overwrites == ((0, 0), (2, 0))
    assert p.classes[g.outs[1]] == p.classes[c0[0]] and capture_problems(p) == []


def test_a_cache_version_that_is_returned_costs_one_copy():
    g, c0 = writes(both=True)
    assert plan(g, TOY, donate=c0).copies == (Copy(2, 0),)


def test_a_kept_cache_is_copied_at_the_first_write_only():
    g, _ = writes()
    assert plan(g, TOY).copies == (Copy(0, 0),)


def test_reference_bodies_never_write_in_place():
    g, c0 = writes()
    p = plan(g, TOY, donate=c0, references=True)
    assert p.copies == () and p.overwrites == () and {k.name for k in p.kernels} == {"reference"}
    assert plan(g, PLAIN, donate=c0).overwrites == ()


def test_an_operand_used_twice_is_copied_once():
    g = trace(lambda x: toy_bump(x, x), t32(4)).graph
    p = plan(g, TOY, donate=g.ins)
    assert p.copies == (Copy(0, 0),) and violation_free(p)
    g = trace(lambda x: toy_both(x, x), t32(4)).graph
    assert plan(g, TOY, donate=g.ins).copies == (Copy(0, 0),)


def test_a_view_of_the_overwritten_operand_in_the_same_equation_forces_a_copy():
    g = trace(lambda c: toy_write(c, toy_row(c, at=1), at=0), t32(4, 2)).graph
    assert plan(g, TOY, donate=g.ins).copies == (Copy(1, 0),)


def test_an_overwrite_through_a_view_needs_the_whole_class_to_be_dead():
    def fn(c, y):
        part = toy_half(c, second=False)
        new = toy_bump(part, y)
        return new, toy_sum(c, None)

    g = trace(fn, t32(4), t32(2)).graph
    assert plan(g, TOY, donate=g.ins[:1]).copies == (Copy(1, 0),)
    g = trace(lambda c, y: toy_bump(toy_half(c, second=False), y), t32(4), t32(2)).graph
    assert plan(g, TOY, donate=g.ins[:1]).copies == ()


def test_results_own_their_storage():
    g = trace(lambda x: (x, x), t32(4)).graph
    assert plan(g, TOY, donate=g.ins).copies == (Copy(0, 1),)            # the same value twice
    assert plan(g, TOY).copies == (Copy(0, 0), Copy(0, 1))               # a kept input that is returned
    g = trace(lambda c: (toy_row(c, at=0), c), t32(4, 2)).graph
    assert plan(g, TOY, donate=g.ins).copies == (Copy(1, 0),)            # the view is copied, never the cache


def test_a_capture_refuses_copies_of_the_state():
    g, c0 = writes()
    assert capture_problems(plan(g, TOY, donate=c0)) == []
    g, c0 = writes(both=True)
    assert "copied before it is written" in capture_problems(plan(g, TOY, donate=c0))[0]
    g = trace(lambda c, k: (toy_write(c, k, at=0), toy_sum(c, None)), t32(4, 2), t32(2)).graph
    assert "copied before it is written" in capture_problems(plan(g, TOY, donate=g.ins[:1]))[0]


def test_parameters_cannot_be_donated():
    g = trace(lambda p, x: toy_bump(p, x), t32(4), t32(4), tags=("param", "state")).graph
    with pytest.raises(GraphError, match="cannot be donated"):
        plan(g, TOY, donate=("param",))
    with pytest.raises(GraphError, match="no input"):
        plan(g, TOY, donate=("cache",))
    assert input_bytes(plan(g, TOY), "param") == 16


def test_an_in_place_result_of_another_type_is_refused():
    @private
    def toy_grow(x: T[Tensor, "n", FLOAT]) -> T[Tensor, "2*n", "x"]:
        return torch.cat([x, x])

    kernel(toy_grow, needs={"toy"}, name="wrong", inplace={0: "x"})(lambda x: x)
    g = trace(toy_grow, t32(4)).graph
    with pytest.raises(GraphError, match="another type"):
        plan(g, TOY)


def violation_free(p):
    return violation_f32(p) is None


def violation_f32(p):
    x = torch.arange(4.0)
    got = generate(p).bind()(x.clone())[0]
    return None if torch.allclose(got, 2 * x + 0.2) else "wrong"
