"""Generated programs: readable text, bound parameters, early deletion, errors that name the model line."""

import gc
import linecache
import re
import traceback
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_toys import (
    PLAIN,
    TOY,
    private,
    t32,
    toy_both,
    toy_bump,
    toy_half,
    toy_lookup,
    toy_pair,
    toy_row,
    toy_sum,
    toy_until,
    toy_write,
)
from torch import Tensor

from afl.errors import CheckFailed, TypeRuleError
from afl.ir.kernel import kernel
from afl.ir.op import FLOAT, T
from afl.ir.program import compile_graph, difference, same_program
from afl.ir.trace import Eager, trace, using
from afl.ops.basic import cast, scale
from afl.types import HostInts, HostIntsType, TensorType


def model(params, state, x, n):
    c = toy_write(state["cache"], x, at=1)
    a, b = toy_pair(x + params["w"][0], params["w"][1])
    h = toy_sum(a, None) * 0.5
    return {"cache": c}, cast(h, dtype=torch.float64), toy_until(c, n), toy_row(c, at=0), toy_bump(b, b)


def traced():
    params, state = {"w": (t32(3), t32(3))}, {"cache": t32(2, 3)}
    return trace(model, params, state, t32(3), HostIntsType(2), tags=("param", "state", "batch", "batch"))


def values(rng):
    w, x = (rng.normal(3), rng.normal(3)), rng.normal(3)
    return {"w": w}, {"cache": rng.normal(2, 3)}, x, HostInts([1, 3])


def test_the_source_reads_like_the_model(golden):
    p = compile_graph(traced(), TOY, donate=("state",))
    golden("ir_program", re.sub(r"test_program.py:\d+", "model.py:7", p.source) + f"\n{p.plan!r}\n")
    assert len(repr(p).splitlines()) <= 20


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("references", [False, True])
def test_a_bound_program_equals_eager(rng, checked, references):
    params, state, x, n = values(rng)
    with using(Eager(TOY)):
        want = model(params, state, x, n)
    p = compile_graph(traced(), TOY, references=references, checked=checked)
    got = p.bind(params["w"]).on(state, x, n)
    assert torch.allclose(got[0]["cache"], want[0]["cache"])
    for a, b in zip(got[1:], want[1:], strict=True):
        assert torch.allclose(a, b) and a.dtype == b.dtype


def test_binding_checks_the_number_and_the_types_of_parameters():
    p = compile_graph(traced(), TOY)
    with pytest.raises(TypeRuleError, match="has 2 parameters, got 1"):
        p.bind([torch.ones(3)])
    with pytest.raises(TypeRuleError, match=r"parameter w.1 of 'step' is f32\[4\], traced as f32\[3\]"):
        p.bind([torch.ones(3), torch.ones(4)])


def test_values_die_after_their_last_use():
    seen = []

    @private
    def toy_probe(x: T[Tensor, "n", FLOAT]) -> T[Tensor, "n", "x"]:
        return x + 1

    def probe(x):
        gc.collect()
        seen.append([r() is not None for r in refs])
        y = x + 1
        refs.append(weakref.ref(y))
        return y

    refs = []
    kernel(toy_probe, needs={"toy"}, name="probe")(probe)
    g = trace(lambda x: toy_probe(toy_probe(toy_probe(x))), t32(2)).graph
    out = compile_graph(g, TOY).bind()(torch.ones(2))
    assert seen == [[], [True], [False, True]] and out[0].tolist() == [4.0, 4.0]


def test_constants_and_absent_operands_reach_the_kernels():
    w = torch.full((3,), 2.0)
    g = trace(lambda x: scale(toy_sum(x, None) + w, by=float("inf")), t32(3)).graph
    p = compile_graph(g, PLAIN)
    assert "None" in p.source and "inf" not in p.source
    assert p.bind()(torch.ones(3))[0].tolist() == [float("inf")] * 3
    assert [v for v in p.constants.values() if isinstance(v, torch.Tensor)] == [w]


def test_awkward_names_stay_python():
    names = ("class", "a-b", "a.b", "")
    g = trace(lambda a: tuple(x + x for x in a.values()), {n: t32(2) for n in names}).graph
    out = compile_graph(g, PLAIN, name="my step!").bind()(*(torch.full((2,), float(i)) for i in range(4)))
    assert [x[0].item() for x in out] == [0.0, 2.0, 4.0, 6.0]


def test_a_function_may_return_nothing_or_one_value():
    assert compile_graph(trace(lambda x: (), t32(2)), PLAIN).bind()(torch.ones(2)) == ()
    assert compile_graph(trace(lambda x: x + x, t32(2)), PLAIN).bind().on(torch.ones(2)).tolist() == [2.0, 2.0]


# ---- one program for many sizes ------------------------------------------------------------------------------------


def at(fn, n):
    return compile_graph(trace(fn, t32(n, 4), t32(n, 4)), TOY)


def test_programs_traced_at_two_sizes_are_the_same_unless_the_text_mentions_the_size():
    assert same_program(*(at(lambda a, b: toy_bump(a + b, b).reshape(-1), n) for n in (2, 90)))
    why = difference(at(lambda a, b: a.reshape(a.shape[0] * 4), 2), at(lambda a, b: a.reshape(a.shape[0] * 4), 90))
    assert "shape=(8,)" in why and "shape=(360,)" in why and "test_program.py" in why


def test_a_constant_that_depends_on_the_size_makes_programs_differ():
    assert "constant" in difference(*(at(lambda a, b: a + torch.ones(a.shape), n) for n in (2, 3)))
    assert same_program(*(at(lambda a, b: a + torch.ones(a.shape), 2) for _ in range(2)))
    # an infinite factor is no literal of the text: it is compared by value all the same
    assert not same_program(*(at(lambda a, b: scale(a, by=float("inf") * (-1) ** a.shape[0]), n) for n in (2, 3)))


def test_another_kernel_makes_programs_differ():
    @private
    def toy_switch(x: T[Tensor, "n d", FLOAT]) -> T[Tensor, "n d", "x"]:
        return x + 0

    kernel(toy_switch, needs={"toy"}, name="few", when=lambda x: x.shape[0] < 8, priority=1)(lambda x: x + 0)
    kernel(toy_switch, needs={"toy"}, name="many")(lambda x: x + 0)
    why = difference(*(at(lambda a, b: toy_switch(a), n) for n in (2, 90)))
    assert "toy_switch/few in one" in why and "toy_switch/many in the other" in why


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.integers(0, 100))
def test_lengths_are_inputs_so_a_program_holds_for_every_length(lens, seed):
    """D06: traced at one length, run at others."""
    x = torch.rand(2, 5, generator=torch.Generator().manual_seed(seed))
    got = LENGTHS.bind()(x, HostInts(lens))[0]
    assert torch.allclose(got, torch.tensor([x[i, :n].sum() for i, n in enumerate(lens)]))


LENGTHS = compile_graph(trace(toy_until, t32(2, 5), HostInts([5, 5])), PLAIN)


def test_a_callers_buffer_may_be_reused_right_after_the_call():
    """D07: host inputs are copied."""
    import numpy as np

    mine = np.array([2, 3], dtype=np.int32)
    n = HostInts(mine)
    mine[:] = 0
    x = torch.ones(2, 5)
    assert LENGTHS.bind()(x, n)[0].tolist() == [2.0, 3.0]


# ---- errors ----------------------------------------------------------------------------------------------------------


@private
def toy_fail(x: T[Tensor, "n", FLOAT]) -> T[Tensor, "n", "x"]:
    """Fails when it runs."""
    raise ValueError("broken kernel")


def test_an_exception_names_the_equation_the_model_line_and_the_kernel():
    p = compile_graph(trace(lambda x: toy_fail(x + x) + x, t32(2)), PLAIN)
    with pytest.raises(ValueError, match="broken kernel") as e:
        p.bind()(torch.ones(2))
    note = e.value.__notes__[0]
    assert "equation 1 of program 'step', from test_program.py:" in note
    assert "kernel reference" in note and "toy_fail %1" in note
    text = "".join(traceback.format_exception(e.value))
    assert "<afl program step" in text and "k_toy_fail_reference(v0)" in text       # the generated line, via linecache
    assert len(e.value.__notes__) == 1


def test_a_wrong_number_of_inputs_is_named():
    with pytest.raises(TypeError) as e:
        LENGTHS.bind()(torch.ones(2, 5))
    assert "takes 2 inputs" in e.value.__notes__[0]


def test_sources_leave_with_their_programs():
    p = compile_graph(trace(lambda x: x + x, t32(2)), PLAIN)
    name = p.code.co_filename
    assert name in linecache.cache
    linecache.checkcache()
    assert name in linecache.cache
    del p
    gc.collect()
    assert name not in linecache.cache


# ---- checked mode ----------------------------------------------------------------------------------------------------


def test_checked_programs_refuse_indices_out_of_range():
    """D11: an error, never a clamp."""
    t = trace(toy_lookup, t32(4, 2), TensorType((2,), torch.int32))
    table, i = torch.ones(4, 2), torch.tensor([1, 4], dtype=torch.int32)
    compile_graph(t, PLAIN).bind()(table, i)
    with pytest.raises(CheckFailed, match="holds index 4, allowed are 0 to 3") as e:
        compile_graph(t, PLAIN, checked=True).bind()(table, i)
    assert "equation 0" in e.value.__notes__[0]
    with pytest.raises(CheckFailed, match="index -1"):
        compile_graph(t, PLAIN, checked=True).bind()(table, i - 2)


def test_checked_programs_hold_kernels_to_what_they_declare_about_storage():
    @private
    def toy_alias(x: T[Tensor, "n", FLOAT]) -> T[Tensor, "n", "x"]:
        return x + 1

    kernel(toy_alias, needs={"toy"}, name="same")(lambda x: x)
    g = trace(toy_alias, t32(2)).graph
    with pytest.raises(CheckFailed, match="returned storage of operand 'x' as result 0"):
        compile_graph(g, TOY, checked=True).bind()(torch.ones(2))

    @private
    def toy_moved(x: T[Tensor, "n", FLOAT]) -> T[Tensor, "n", "x"]:
        return x + 1

    kernel(toy_moved, needs={"toy"}, name="moved", inplace={0: "x"})(lambda x: x + 1)
    g = trace(toy_moved, t32(2)).graph
    with pytest.raises(CheckFailed, match="in place of 'x' but returned other storage"):
        compile_graph(g, TOY, checked=True).bind()(torch.ones(2))


def test_checked_programs_allow_views_and_overwrites():
    def fn(a, b):
        x, y = toy_both(a, b)
        return toy_half(toy_bump(x, y), second=True), y

    g = trace(fn, t32(4), t32(4)).graph
    a, b = torch.ones(4), torch.ones(4)
    plain = compile_graph(g, TOY, donate=g.ins).bind()(a.clone(), b.clone())
    checked = compile_graph(g, TOY, donate=g.ins, checked=True).bind()(a, b)
    assert all(torch.equal(x, y) for x, y in zip(plain, checked, strict=True))


# ---- cost, counted and not timed -------------------------------------------------------------------------------------


def test_a_program_runs_one_line_and_one_kernel_per_equation():
    def fn(x, y):
        for _ in range(64):
            x = toy_bump(x, y) + y
        return x

    g = trace(fn, t32(2), t32(2)).graph
    p = compile_graph(g, TOY, donate=g.ins[:1])
    lines = [r for r in p.source.splitlines()[1:-1] if not r.lstrip().startswith("del ")]
    assert len(lines) == len(g.eqns) == 128 and p.plan.copies == () and len(p.kernels) == 2
