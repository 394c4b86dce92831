"""Passes keep the inputs and the meaning, and never touch communication that does something."""

from ir_toys import PLAIN, t32, toy_all_reduce, toy_pair, toy_sum

from afl.ir.graph import check
from afl.ir.passes import cse, dce, drop_unit_collectives, exact
from afl.ir.program import compile_graph
from afl.ir.trace import trace
from afl.ops.basic import scale


def ops(g):
    check(g)
    return [e.op.name for e in g.eqns]


def test_dead_equations_go_and_partly_used_ones_stay():
    def fn(a, b):
        s, _ = toy_pair(a, b)
        toy_sum(toy_sum(a, b), None)
        return s

    g = dce(trace(fn, t32(3), t32(3)).graph)
    assert ops(g) == ["toy_pair"] and len(g.ins) == 2


def test_dead_communication_stays_because_other_ranks_wait_for_it():
    g = dce(trace(lambda a: (toy_all_reduce(a + a, axis="tp"), a - a)[1], t32(3)).graph)
    assert ops(g) == ["add", "toy_all_reduce", "sub"]


def test_equal_equations_are_computed_once_also_when_equality_follows_from_others():
    def fn(a, b):
        return scale(a + b, by=2.0) - scale(a + b, by=2.0), toy_sum(a, None) - toy_sum(a, None)

    g = cse(trace(fn, t32(3), t32(3)).graph)
    assert ops(g) == ["add", "scale", "sub", "toy_sum", "sub"]


def test_parameters_that_only_compare_equal_are_different():
    g = cse(trace(lambda a: tuple(scale(a, by=k) for k in (1, 1.0, True, 0.0, -0.0)), t32(3)).graph)
    assert len(g.eqns) == 5
    assert exact((1, (True, 0.0))) != exact((1, (1, 0.0))) and exact(float("nan")) == exact(float("nan"))


def test_communication_is_never_merged():
    g = cse(trace(lambda a: toy_all_reduce(a, axis="tp") - toy_all_reduce(a, axis="tp"), t32(3)).graph)
    assert ops(g) == ["toy_all_reduce", "toy_all_reduce", "sub"]


def test_equal_results_are_still_two_results():
    import torch

    g = trace(lambda a: (a + a, a + a), t32(3)).graph
    x, y = compile_graph(g, PLAIN).bind()(torch.ones(3))
    x.zero_()
    assert y.tolist() == [2.0, 2.0, 2.0]


def test_collectives_over_one_rank_disappear():
    g = trace(lambda a: toy_all_reduce(toy_all_reduce(a + a, axis="tp"), axis="ep") + a, t32(3)).graph
    assert ops(drop_unit_collectives(g, {"tp": 1, "ep": 2})) == ["add", "toy_all_reduce", "add"]
    assert ops(drop_unit_collectives(g, {})) == ["add", "add"]
    assert drop_unit_collectives(g, {"tp": 2, "ep": 2}) is g
