"""jit: how many traces, which program for which size, donation, strictness."""

import pytest
import torch
from ir_toys import PLAIN, TOY, private, t32, toy_all_reduce, toy_bump, toy_lookup, toy_sum, toy_write
from torch import Tensor

from afl import tree
from afl.errors import AflError, CheckFailed, ConfigError, RetraceError, TypeRuleError, UseAfterDonation
from afl.ir.buckets import Ladder, probes
from afl.ir.jit import jit
from afl.ir.kernel import kernel
from afl.ir.op import FLOAT, T
from afl.ir.rewrite import Rule
from afl.types import HostIntsType


@tree.struct
class Params:
    w: Tensor
    b: Tensor


@tree.struct
class State:
    cache: Tensor
    n: Tensor


def step(params, state, x):
    cache = toy_write(state.cache, params.b, at=1)
    return State(cache, toy_bump(state.n, state.n)), (x + params.w) * 2.0


def params():
    return Params(torch.ones(3), torch.full((3,), 2.0))


def state():
    return State(torch.zeros(2, 3), torch.ones(1))


# ---- trees, for notebooks ----------------------------------------------------------------------------------------


def test_a_call_traces_once_per_combination_of_leaf_types():
    f = jit(lambda a, b: a + b, chip=PLAIN)
    for n in (2, 3, 2, 3, 2):
        assert f(torch.ones(n), torch.ones(n)).tolist() == [2.0] * n
    assert f.traces == 2
    f(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    assert f.traces == 3 and len(f.programs()) == 3


def test_structures_and_static_keywords_are_part_of_the_key():
    f = jit(lambda d, *, k=1.0: {"y": d["x"] * k, "n": None}, chip=PLAIN)
    assert f({"x": torch.ones(2)}, k=2.0)["y"].tolist() == [2.0, 2.0]
    assert f({"x": torch.ones(2)}, k=3.0)["y"].tolist() == [3.0, 3.0]
    assert f({"x": torch.ones(2)}, k=2.0)["y"].tolist() == [2.0, 2.0] and f.traces == 2
    with pytest.raises(ConfigError, match="static keywords are hashable"):
        f({"x": torch.ones(2)}, k=[2.0])


def test_parameters_are_bound_once_by_identity():
    f, p = jit(step, chip=TOY), params()
    f(p, state(), torch.ones(3))
    (bound,) = f._bound.values()
    f(p, state(), torch.ones(3))
    assert list(f._bound.values()) == [bound]
    q = tree.evolve(p, w=torch.full((3,), 5.0))
    assert f(q, state(), torch.ones(3))[1].tolist() == [12.0] * 3 and f.traces == 1
    with pytest.raises(ConfigError, match="takes 3 arguments"):
        f(p, state())


def test_without_donation_the_arguments_stay_whole():
    f, s = jit(step, chip=TOY), state()
    new, _ = f(params(), s, torch.ones(3))
    assert s.cache.sum() == 0 and new.cache.sum() == 6


def test_a_donated_tree_is_overwritten_and_reading_it_names_the_call():
    f, s = jit(step, chip=TOY, donate=("state",)), state()
    home = s.cache.data_ptr()
    new, _ = f(params(), s, torch.ones(3))
    assert new.cache.data_ptr() == home
    with pytest.raises(UseAfterDonation, match=r"State.cache was read after step\(\) at test_jit.py:\d+ had taken it"):
        s.cache  # noqa: B018
    with pytest.raises(UseAfterDonation):
        f(params(), s, torch.ones(3))
    for _ in range(3):
        new, _ = f(params(), new, torch.ones(3))
    assert new.cache.data_ptr() == home and f.traces == 1
    assert repr(s) == "State(donated)"


def test_donation_by_position_equals_donation_by_name():
    s = state()
    jit(step, chip=TOY, donate=(1,))(params(), s, torch.ones(3))
    with pytest.raises(UseAfterDonation):
        s.n  # noqa: B018


def test_what_cannot_be_donated_is_refused():
    with pytest.raises(ConfigError, match="cannot be donated"):
        jit(step, chip=TOY, donate=("params",))
    with pytest.raises(ConfigError, match="donate names 'cache', the function takes params, state, x"):
        jit(step, chip=TOY, donate=("cache",))
    f = jit(lambda a, b: (toy_bump(a, b), b), chip=TOY, donate=("a",))
    x = torch.ones(2)
    with pytest.raises(AflError, match="a is donated but shares storage with b"):
        f(x, x)
    with pytest.raises(AflError, match="state.cache is donated but shares storage with the parameters"):
        p = Params(torch.ones(3), torch.ones(3))
        jit(step, chip=TOY, donate=("state",))(p, State(p.w.expand(2, 3), torch.ones(1)), torch.ones(3))


def test_a_failing_call_leaves_the_donated_tree_readable():
    @private
    def toy_crash(x: T[Tensor, "n", FLOAT]) -> T[Tensor, "n", "x"]:
        raise ValueError("crash")

    f = jit(lambda state: State(state.cache + state.cache, toy_crash(state.n)), chip=PLAIN, donate=(0,))
    s = state()
    with pytest.raises(ValueError, match="crash"):
        f(s)
    assert s.n.tolist() == [1.0]


def test_eager_traces_nothing():
    """D12."""
    f, s = jit(step, chip=TOY, donate=("state",), eager=True), state()
    home = s.cache.data_ptr()
    want = jit(step, chip=TOY)(params(), state(), torch.ones(3))
    got = f(params(), s, torch.ones(3))
    assert f.traces == 0 and f.programs() == [] and f.warm().traces == 0
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True))
    assert got[0].cache.data_ptr() == home
    with pytest.raises(UseAfterDonation):
        s.cache  # noqa: B018
    with pytest.raises(ConfigError, match="nothing is traced"):
        f.program(tokens=3)


def test_options_reach_the_program():
    rule = Rule(lambda x, y: x + y, lambda x, y: toy_bump(x, y), name="wrong, but easy to see")
    for chip, ops in ((TOY, ["toy_bump"]), (PLAIN, ["add"])):           # plain has no kernel for it
        f = jit(lambda a, b: toy_all_reduce(a + b, axis="tp"), chip=chip, rules=(rule,))
        f(torch.ones(2), torch.ones(2))
        assert [e.op.name for e in f.programs()[0].graph.eqns] == ops
    f = jit(lambda a, b: toy_all_reduce(toy_bump(a, b), axis="tp"), chip=TOY, mesh={"tp": 2}, references=True)
    f(torch.ones(2), torch.ones(2))
    assert [e.op.name for e in f.programs()[0].graph.eqns] == ["toy_bump", "toy_all_reduce"]
    assert {k.name for k in f.programs()[0].plan.kernels} == {"reference"}
    f = jit(lambda t, i: toy_lookup(t, i), chip=PLAIN, checked=True)
    with pytest.raises(CheckFailed):
        f(torch.ones(2, 2), torch.tensor([2], dtype=torch.int32))


# ---- strict mode -----------------------------------------------------------------------------------------------------


def test_strict_mode_refuses_a_trace_after_warm_up():
    f = jit(lambda a: a + a, chip=PLAIN, strict=True)
    f.warm(t32(2)).warm(t32(3))
    assert f.traces == 2 and f(torch.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(RetraceError, match=r"would be traced after warm-up, for arguments f32\[4\]"):
        f(torch.ones(4))
    assert f.traces == 2


# ---- sizes: ranges -----------------------------------------------------------------------------------------------


def varying(params, state, x, n):
    """Parameters and state of fixed size, a batch of any."""
    return {"c": toy_bump(state["c"], state["c"])}, toy_sum(x + x, None).reshape(-1, 2), x + x


def abstract(s):
    return t32(4), {"c": t32(5)}, t32(s["tokens"], 4), HostIntsType(s["rows"])


RANGES = {"tokens": (2, 512), "rows": (1, 64)}


def sized(fn=varying, **options):
    options = {"chip": TOY, "donate": ("state",), "abstract": abstract, "ranges": RANGES, **options}
    return jit(fn, **options).bind(torch.ones(4))


def test_one_program_serves_every_size_of_a_range():
    from afl.types import HostInts

    f = sized(strict=True).warm()
    assert f.traces == 1 and f.reasons == {}
    for tokens, rows in ((2, 1), (512, 64), (37, 5), (100, 64)):
        p = f.program(tokens=tokens, rows=rows)
        c, y, z = p(torch.ones(5), torch.ones(tokens, 4), HostInts([0] * rows))
        assert c.shape == (5,) and y.shape == (tokens * 2, 2) and z.sum() == tokens * 8 and p.sizes is None
    assert f.traces == 1 and f.program(tokens=9, rows=9) is f.program(tokens=3, rows=1)


def test_five_hundred_random_sizes_cost_one_trace():
    """D09."""
    import random

    f = sized()
    gen = random.Random(0)
    for _ in range(500):
        f.program(tokens=gen.randint(2, 512), rows=gen.randint(1, 64))
    assert f.traces == 1


def test_sizes_outside_every_range_get_a_program_of_their_own_unless_strict():
    f = sized()
    assert f.program(tokens=1, rows=1).sizes == {"tokens": 1, "rows": 1} and f.traces == 1
    f.program(tokens=1, rows=1)
    assert f.traces == 1
    strict = sized(strict=True).warm()
    with pytest.raises(RetraceError, match="tokens=1 rows=1, which is not declared. Declared ranges: tokens 2..512, r"):
        strict.program(tokens=1, rows=1)


def test_several_ranges_make_several_programs():
    ranges = ({"tokens": (1, 1), "rows": (1, 64)}, RANGES)
    f = sized(ranges=ranges, strict=True).warm()
    assert f.traces == 2 and f.program(tokens=1, rows=7) is not f.program(tokens=2, rows=7)


def baked(params, state, x, n):
    return {"c": state["c"]}, x.reshape(x.shape[0] * 4)


def test_a_program_that_bakes_a_size_is_not_widened_and_says_why():
    f = sized(baked)
    p = f.program(tokens=3, rows=2)
    assert p.sizes == {"tokens": 3, "rows": 2} and p(torch.ones(5), torch.ones(3, 4), None)[1].shape == (12,)
    f.program(tokens=4, rows=2)
    f.program(tokens=3, rows=2)
    assert f.traces == 2
    assert "shape=(8,)" in f.reasons[0] and "shape=(2048,)" in repr(f) and "test_jit.py" in repr(f)
    strict = sized(baked, strict=True).warm()
    with pytest.raises(RetraceError, match="not one program: between tokens=2 rows=1 and"):
        strict.program(tokens=3, rows=2)


def test_what_the_two_ends_have_in_common_by_accident_is_found_between_them():
    def parity(params, state, x, n):
        return {"c": state["c"]}, x * float(1 + x.shape[0] % 2)

    assert "tokens=31" in sized(parity).warm().reasons[0]


def test_a_kernel_that_does_not_widen_forbids_widening():
    @private
    def toy_stiff(x: T[Tensor, "n d", FLOAT]) -> T[Tensor, "n d", "x"]:
        return x + 0

    kernel(toy_stiff, needs={"toy"}, name="stiff", widens=False)(lambda x: x + 0)
    f = sized(lambda params, state, x, n: (state, toy_stiff(x))).warm()
    assert f.reasons == {0: "kernel stiff of toy_stiff does not widen"}


def test_probes_are_distinct_where_they_can_be():
    low, high, middle = probes({"tokens": (2, 8192), "rows": (1, 8192), "width": (1, 8192)})
    assert low == {"tokens": 2, "rows": 1, "width": 1} and set(high.values()) == {8192}
    assert len(set(middle.values())) == 3
    assert probes({"tokens": (1, 1)}) == ({"tokens": 1},)


def test_other_parameters_bind_anew_without_a_trace_and_other_types_are_refused():
    f = sized(lambda params, state, x, n: (state, x.reshape(-1, 4) + x, params * 1.0))
    inputs = torch.ones(5), torch.ones(3, 4), None
    a = f.program(tokens=3, rows=1)
    b = f.bind(torch.full((4,), 2.0)).program(tokens=3, rows=1)
    assert b(*inputs)[2].tolist() == [2.0] * 4 and a(*inputs)[2].tolist() == [1.0] * 4 and f.traces == 1
    with pytest.raises(TypeRuleError, match="traced as"):
        f.bind(torch.ones(5)).program(tokens=3, rows=1)


def test_sizes_need_abstract_arguments():
    with pytest.raises(ConfigError, match="need `abstract`"):
        jit(varying, chip=TOY, ranges=RANGES)


# ---- sizes: ladder -------------------------------------------------------------------------------------------------

LADDER = Ladder({"tokens": (2, 4, 16), "rows": (1, 4)})


def test_a_ladder_makes_one_program_per_bucket_and_says_which():
    f = sized(ranges=(), ladder=LADDER, strict=True).warm()
    assert f.traces == 6 and [p.graph.ins[2].type.shape[0] for p in f.programs()] == [16, 16, 4, 4, 2, 2]
    assert f.program(tokens=3, rows=1).sizes == {"tokens": 4, "rows": 1}
    for tokens in range(1, 17):
        for rows in range(1, 5):
            f.program(tokens=tokens, rows=rows)
    assert f.traces == 6


def test_past_the_largest_bucket_is_an_untraced_size_or_a_strict_error():
    """D05."""
    f = sized(ranges=(), ladder=LADDER)
    assert LADDER.fit({"tokens": 17, "rows": 1}) is None
    assert f.program(tokens=17, rows=1).sizes == {"tokens": 17, "rows": 1}
    strict = sized(ranges=(), ladder=LADDER, strict=True).warm()
    with pytest.raises(RetraceError, match=r"tokens=17 rows=1, .*Declared buckets: tokens \[2, 4, 16\]; rows \[1, 4\]"):
        strict.program(tokens=17, rows=1)


def test_a_ladder_is_ascending():
    for bad in ((), (4, 2), (2, 2), (0, 2)):
        with pytest.raises(ConfigError, match="ascending"):
            Ladder({"tokens": bad})
