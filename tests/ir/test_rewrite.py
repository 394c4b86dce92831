"""Rewriting: what matches, what must not, and that meaning is kept wherever the replacement ends up."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_toys import PLAIN, TOY, private, t32, toy_all_reduce, toy_bump, toy_fused, toy_half, toy_pair, toy_sum
from torch import Tensor

from afl.errors import GraphError
from afl.ir.graph import Equation, Graph, Var, check
from afl.ir.op import FLOAT, T
from afl.ir.passes import usable
from afl.ir.plan import plan
from afl.ir.program import generate
from afl.ir.rewrite import Rule, rewrite
from afl.ir.trace import trace
from afl.ops.basic import add, cast, mul, scale, sub

FUSE = Rule(lambda x, y, *, by: (scale(x + y, by=by)), lambda x, y, *, by: toy_fused(x, y, by=by), name="fuse")


def ops(g):
    check(g)
    return [e.op.name for e in g.eqns]


def same(g, h):
    """Both graphs give the same on random inputs."""
    gen = torch.Generator().manual_seed(0)
    xs = [torch.rand(v.type.shape, generator=gen, dtype=v.type.dtype) for v in g.ins]
    a, b = (generate(plan(f, PLAIN)).bind()(*xs) for f in (g, h))
    return all(torch.allclose(x, y, rtol=1e-5) for x, y in zip(a, b, strict=True))


def test_wildcards_carry_operands_and_static_parameters():
    g = trace(lambda a, b: (a + b) * 0.5 - (b + a) * 0.25, t32(3), t32(3)).graph
    h = rewrite(g, (FUSE,))
    assert ops(h) == ["toy_fused", "toy_fused", "sub"]
    assert [dict(e.params) for e in h.eqns[:2]] == [{"by": 0.5}, {"by": 0.25}]
    assert same(g, h) and h.eqns[0].where == g.eqns[1].where


def test_an_interior_value_that_is_used_or_returned_elsewhere_stops_the_match():
    def used(a, b):
        s = a + b
        return s * 0.5 - s

    def returned(a, b):
        s = a + b
        return s * 0.5, s

    for fn in (used, returned):
        g = trace(fn, t32(3), t32(3)).graph
        assert rewrite(g, (FUSE,)) is g


def test_a_repeated_wildcard_must_be_the_same_value_and_the_same_parameter():
    double = Rule(lambda x: x + x, lambda x: x * 2.0)
    g = trace(lambda a, b: (a + a) - (a + b), t32(3), t32(3)).graph
    assert ops(rewrite(g, (double,))) == ["scale", "add", "sub"]
    twice = Rule(lambda x, *, by: scale(scale(x, by=by), by=by), lambda x, *, by: scale(x, by=by), name="twice")
    g = trace(lambda a: (scale(scale(a, by=0.5), by=0.5), scale(scale(a, by=0.5), by=0.25)), t32(3)).graph
    assert ops(rewrite(g, (twice,))) == ["scale", "scale", "scale"]


def test_fixed_parameters_match_by_value_and_type():
    unit = Rule(lambda x: scale(x, by=1.0), lambda x: x, name="unit")
    g = trace(lambda a: (scale(a, by=1.0), scale(a, by=1), scale(a, by=2.0)), t32(3)).graph
    h = rewrite(g, (unit,))
    assert ops(h) == ["scale", "scale"] and h.outs[0] is h.ins[0]


def test_patterns_may_have_several_results():
    def pattern(a, b):
        s, d = toy_pair(a, b)
        return s, d * 0.5

    rule = Rule(pattern, lambda a, b: (toy_bump(a, b), scale(a - b, by=0.5)), name="several")
    g = trace(lambda a, b: (lambda p: (p[0], scale(p[1], by=0.5)))(toy_pair(a, b)), t32(3), t32(3)).graph
    assert ops(rewrite(g, (rule,))) == ["toy_bump", "sub", "scale"]


def test_a_result_that_the_pattern_ignores_must_be_unused():
    rule = Rule(lambda a, b: toy_pair(a, b)[0], lambda a, b: toy_bump(a, b), name="first")
    g = trace(lambda a, b: toy_pair(a, b)[0], t32(3), t32(3)).graph
    assert ops(rewrite(g, (rule,))) == ["toy_bump"]
    g = trace(lambda a, b: toy_pair(a, b), t32(3), t32(3)).graph
    assert rewrite(g, (rule,)) is g


def two_products(x, y, z):
    return mul(x, y), mul(x, z)


JOIN = Rule(two_products, lambda x, y, z: (toy_sum(x, y), toy_sum(x, z)), name="join")


def test_siblings_are_found_through_a_shared_operand():
    g = trace(lambda x, y, z: mul(x, y) - mul(x, z), t32(3), t32(3), t32(3)).graph
    h = rewrite(g, (JOIN,))
    assert ops(h) == ["toy_sum", "toy_sum", "sub"]
    made = {e.outs[0]: e.ins[1] for e in h.eqns}
    assert [made[v] for v in h.eqns[2].ins] == list(g.ins[1:])


def test_the_replacement_moves_before_the_first_reader_of_an_early_result():
    def fn(x, y, z):
        early = mul(x, y)
        reader = early + early
        return reader, mul(x, z)

    g = trace(fn, t32(3), t32(3), t32(3)).graph
    h = rewrite(g, (JOIN,))
    assert ops(h) == ["toy_sum", "toy_sum", "add"]


def test_there_is_no_match_where_the_replacement_can_stand_nowhere():
    def fn(x, y):
        early = mul(x, y)
        late = early + early            # the second product needs a value that needs the first
        return mul(x, late)

    g = trace(fn, t32(3), t32(3)).graph
    assert rewrite(g, (JOIN,)) is g


def test_a_wildcard_never_stands_for_a_value_of_the_match_itself():
    def fn(x):
        s = x + x
        return mul(s, s)

    g = trace(fn, t32(3)).graph
    rule = Rule(lambda x, y, z: mul(x + y, z), lambda x, y, z: mul(x, z) + mul(y, z), name="distribute")
    assert rewrite(g, (rule,)) is g
    g = trace(lambda x: mul(x, mul(x, x)), t32(3)).graph
    assert rewrite(g, (JOIN,)) is g


def test_a_rule_with_a_wrong_replacement_is_an_error_and_not_a_wrong_graph():
    g = trace(lambda a: cast(a, dtype=torch.float64), t32(4)).graph
    with pytest.raises(GraphError, match="replaces f64.* by f32"):
        rewrite(g, (Rule(lambda x, *, dtype: cast(x, dtype=dtype), lambda x: scale(x, by=1.0), name="bad"),))
    g = trace(lambda a, b: a + b, t32(3), t32(3)).graph
    with pytest.raises(GraphError, match="add a `when`"):
        rewrite(g, (Rule(lambda x, y: x + y, lambda x, y: toy_half(x, second=True), name="odd"),))
    with pytest.raises(GraphError, match="no parameters of the pattern"):
        Rule(lambda x: x + x, lambda z: z)
    with pytest.raises(GraphError, match="never a wildcard"):
        rewrite(g, (Rule(lambda x: x, lambda x: x, name="idle"),))
    with pytest.raises(GraphError, match="never concrete values"):
        rewrite(g, (Rule(lambda x: add(x, torch.ones(3)), lambda x: x, name="solid"),))


def test_when_sees_types_and_parameters():
    rule = Rule(lambda x, y, *, by: scale(x + y, by=by), lambda x, y, *, by: toy_fused(x, y, by=by),
                when=lambda x, by: x.shape[0] > 3 and by < 1)
    g = trace(lambda a, b: (scale(a + a, by=0.5), scale(b + b, by=0.5), scale(b + b, by=2.0)), t32(3), t32(4)).graph
    assert ops(rewrite(g, (rule,))) == ["add", "scale", "toy_fused", "add", "scale"]


def test_absent_operands_match_absent_operands():
    rule = Rule(lambda x: toy_sum(x, None), lambda x: x + x, name="plus one")
    g = trace(lambda a: (toy_sum(a, None), toy_sum(a, a)), t32(3)).graph
    assert ops(rewrite(g, (rule,))) == ["add", "toy_sum"]
    either = Rule(lambda x, y: toy_sum(x, y), lambda x, y: toy_sum(x, y) * 1.0, name="either")
    assert ops(rewrite(g, (either,))) == ["toy_sum", "scale"] * 2


def test_a_rule_without_a_kernel_for_what_it_brings_in_is_skipped():
    assert usable((FUSE,), TOY) == ()                       # toy_fused has only its reference
    only_known = Rule(lambda x: x + x, lambda x: (x + x) + (x - x), name="known")
    assert usable((only_known,), TOY) == ()                 # sub has none either
    assert usable((Rule(lambda x, y: (x + y) + y, lambda x, y: x + (y + y)),), TOY) != ()
    bump = Rule(lambda x, y: x + y, lambda x, y: toy_bump(x, y), name="bump")
    assert usable((bump,), TOY) == (bump,) and usable((bump,), PLAIN) == ()
    g = trace(lambda a, b: a + b, t32(3), t32(3)).graph
    assert ops(rewrite(g, (bump,), TOY)) == ["toy_bump"] and rewrite(g, (bump,), PLAIN) is g


def test_an_op_of_unknown_arity_cannot_be_named():
    @private
    def toy_many(x: T[Tensor, "n", FLOAT]) -> tuple[Tensor, ...]:
        return (x, x)

    with pytest.raises(GraphError, match="does not declare how many results"):
        rewrite(Graph((), (), ()), (Rule(lambda x: toy_many(x), lambda x: x),))


# ---- random graphs ---------------------------------------------------------------------------------------------

RULES = (
    Rule(lambda x, y, *, by: scale(x + y, by=by), lambda x, y, *, by: toy_fused(x, y, by=by), name="fuse"),
    Rule(lambda x, y, z: (mul(x, y), mul(x, z)), lambda x, y, z: (mul(y, x), mul(z, x)), name="siblings"),
    Rule(lambda x, y: (x + y) - y, lambda x: x, name="cancel"),
    Rule(lambda x, y: (sub(x, y), add(x, y)), lambda x, y: (sub(x, y), add(y, x)), name="both signs"),
)


@st.composite
def graphs(draw):
    ins = [Var(t32(2), f"x{i}") for i in range(draw(st.integers(1, 3)))]
    values, eqns = list(ins), []
    pick = lambda xs: xs[draw(st.integers(0, len(xs) - 1))]                      # noqa: E731
    for _ in range(draw(st.integers(2, 14))):
        op = pick((add, add, scale, scale, mul, mul, sub, toy_pair))
        operands = (pick(values[-5:]),) if op is scale else (pick(values[-5:]), pick(values))
        params = (("by", pick((0.5, 0.25))),) if op is scale else ()
        outs = tuple(Var(t) for t in op.infer(tuple(v.type for v in operands), params))
        eqns.append(Equation(op, operands, params, outs))
        values += outs
    return Graph(tuple(ins), tuple(eqns), tuple(pick(values[-4:]) for _ in range(draw(st.integers(1, 3)))))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(), st.permutations(RULES))
def test_rewritten_graphs_are_well_formed_and_mean_the_same(g, rules):
    h = rewrite(g, tuple(rules))
    check(h)
    xs = [torch.rand(2, generator=torch.Generator().manual_seed(i)) for i in range(len(g.ins))]
    a, b = (generate(plan(f, PLAIN)).bind()(*xs) for f in (g, h))
    for x, y in zip(a, b, strict=True):
        assert torch.allclose(x, y, rtol=1e-3, atol=1e-3 * float(1 + x.abs().max()), equal_nan=True)


def test_one_scan_is_linear_in_the_number_of_equations():
    def fn(x, y):
        for _ in range(64):
            x = scale(x + y, by=0.5) - y
        return x

    g = trace(fn, t32(2), t32(2)).graph
    h = rewrite(g, (FUSE,))
    assert len(g.eqns) == 192 and len(h.eqns) == 128


def test_communication_in_a_pattern_is_an_op_like_any_other():
    def late(x, y):
        return toy_all_reduce(x + y, axis="tp")

    rule = Rule(lambda x, y: toy_all_reduce(x, axis="tp") + y, late, name="late sum")
    g = trace(lambda a, b: toy_all_reduce(a, axis="tp") + b, t32(2), t32(2)).graph
    assert ops(rewrite(g, (rule,))) == ["add", "toy_all_reduce"]
