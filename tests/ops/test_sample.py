"""The sampler's ops against the field's own processors, sorting by hand, and the law that samples must follow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from afl import plugins
from afl.chip import registered
from afl.errors import CheckFailed
from afl.ir.kernel import choose, reference
from afl.ir.trace import Checked, using
from afl.ops.sample import edit_logits, greedy, put_tokens, sample, take_tokens
from afl.types import type_of

plugins.load_ops()
CPU = plugins.chip("cpu")
CHIPS = [c for c in registered().values() if c.soc or c is CPU]
U = torch.arange(0.5, 1000) / 1000          # a grid of uniforms: which tokens come out at all, and how often


def run(op, *args: Tensor) -> Tensor:
    """The result of the reference, once the kernel of every chip was found to give the same: seeds mean the same."""
    types = tuple(map(type_of, args))
    want = op.reference(*args)
    for kernel in {choose(op, types, (), c): c for c in CHIPS}:
        assert kernel is not reference(op), f"{op.name} has no kernel of its own"
        got = kernel.fn(*(x.clone() for x in args))
        assert torch.equal(got, want), f"{kernel}: {got} != {want}"
    return want


def draw(logits: Tensor, u: Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Tensor:
    r = len(logits)

    def column(x, dtype):
        return torch.as_tensor(x, dtype=dtype).expand(r).contiguous()

    f32 = torch.float32
    return run(sample, logits, column(temperature, f32), column(top_k, torch.int32), column(top_p, f32),
               column(min_p, f32), column(u, torch.float64))


def shares(probs: list[float], **params) -> dict[int, float]:
    """Token -> its share over a grid of uniforms, for a row with these probabilities."""
    row = torch.tensor(probs).log()
    ids, times = draw(row.expand(len(U), -1).contiguous(), U, **params).unique(return_counts=True)
    return {i: n / len(U) for i, n in zip(ids.tolist(), times.tolist(), strict=True)}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


# ---- the fixtures of the specification ----------------------------------------------------------------------------


def test_the_token_is_the_first_whose_cumulative_probability_passes_u():
    assert draw(torch.tensor([[0.1, 0.6, 0.3]]).log(), 0.65).tolist() == [1]


def test_a_u_that_lies_on_a_border_takes_the_token_behind_it():
    u = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    assert draw(torch.zeros(4, 4), u).tolist() == [0, 1, 2, 3]


def test_a_min_p_above_one_keeps_the_likeliest():
    assert draw(torch.tensor([[1.0, 3.0, 2.0]] * 3), torch.tensor([0.1, 0.5, 0.9]), min_p=1.5).tolist() == [1, 1, 1]


@pytest.mark.parametrize("k", (1, 2, 3))
def test_top_k_keeps_the_k_likeliest(k: int):
    got = draw(torch.tensor([[1.0, 1.3, 1.2, 1.1]]).expand(1000, 4).contiguous(), U, top_k=k)
    assert sorted(set(got.tolist())) == sorted([1, 2, 3][:k])


def test_top_p_keeps_the_fewest_that_reach_it():
    assert set(shares([0.5, 0.3, 0.15, 0.05], top_p=0.8)) == {0, 1}
    assert set(shares([0.05, 0.3, 0.15, 0.5], top_p=0.81)) == {1, 2, 3}


def test_top_p_counts_what_is_left_after_top_k():
    assert set(shares([0.35, 0.25, 0.2, 0.2], top_k=2, top_p=0.5)) == {0}
    assert set(shares([0.35, 0.25, 0.2, 0.2], top_k=2, top_p=0.6)) == {0, 1}


def test_min_p_keeps_those_at_its_border():
    assert set(shares([0.5, 0.25, 0.125, 0.125], min_p=0.5)) == {0, 1}
    assert set(shares([0.5, 0.25, 0.125, 0.125], min_p=0.5001)) == {0}
    assert set(shares([0.25, 0.5, 0.25], min_p=1.0)) == {1}


def test_ties_at_the_kth_are_kept_and_ties_at_the_border_of_top_p_go_from_the_end():
    assert set(shares([0.2, 0.3, 0.2, 0.3], top_k=1)) == {1, 3}
    assert set(shares([0.25] * 4, top_p=0.5)) == {0, 1}
    assert set(shares([0.25] * 4, top_p=0.51)) == {0, 1, 2}


def test_filters_renormalise():
    assert shares([0.1, 0.6, 0.3], top_k=2) == pytest.approx({1: 2 / 3, 2: 1 / 3}, abs=2e-3)


def test_penalties_of_the_specification():
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    row, token = torch.zeros(2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    minus = torch.tensor([0.5 * 2 + 0.3, 0.0])
    out = run(edit_logits, logits, row, token, torch.zeros(2), torch.full((2,), 2.0), minus)
    assert out[0].tolist() == pytest.approx([-0.3, -2.0, 0.5], abs=1e-6)


# ---- independent oracles ------------------------------------------------------------------------------------------


def by_sorting(logits: list[float], t: float, k: int, p: float, m: float, u: float) -> int:
    """The specification in plain Python, the order of filters included; NaN-free rows with a finite maximum."""
    most = max(logits)
    weight = {i: float(np.exp((np.float64(x) - most) / t)) for i, x in enumerate(logits)}
    kept = [i for i in weight if weight[i] >= m * (1 - 1e-6) and weight[i] > 0]
    if 0 < k < len(logits):
        kth = sorted(logits, reverse=True)[k - 1]
        kept = [i for i in kept if logits[i] >= kth]
    if p < 1:
        tail, gone = (1 - p) * (1 + 1e-6) * sum(weight[i] for i in kept), 0.0
        for i in sorted(kept, key=lambda i: (logits[i], -i))[:-1]:
            gone += weight[i]
            if gone <= tail:
                kept.remove(i)
    goal, total = u * sum(weight[i] for i in kept), 0.0
    for i in kept:
        total += weight[i]
        if total > goal:
            return i
    return kept[-1]


a_logit = st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(-np.inf))
rows_of_logits = st.lists(a_logit, min_size=1, max_size=150)


@settings(max_examples=300, deadline=None)
@given(rows_of_logits, st.sampled_from([0.1, 0.7, 1.0, 3.0]), st.integers(-1, 160),
       st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]), st.sampled_from([0.0, 0.01, 0.3, 1.0]),
       st.integers(0, 10**6).map(lambda i: (i + 0.5) / 1_000_003))     # never a share of equal weights
def test_sample_equals_sorting_by_hand(logits, t, k, p, m, u):
    if max(logits) == -np.inf:
        logits[0] = 0.0
    f32 = [float(np.float32(x)) for x in (t, p, m)]
    assert draw(torch.tensor([logits]), u, t, k, p, m).tolist() == [by_sorting(logits, f32[0], k, f32[1], f32[2], u)]


@pytest.mark.parametrize("sharp", [0.5, 2.0, 6.0])
def test_sample_equals_the_processors_of_transformers(sharp: float):
    n, v = 40, 777
    x = normal(int(sharp * 2), n, v) * sharp
    asked = [(0.7, 0, 0, 1), (1.3, 0.05, 0, 1), (1.0, 0, 50, 1), (0.9, 0, 0, 0.9), (1.5, 0.01, 40, 0.6)]
    for t, m, k, p in asked:
        scores = TemperatureLogitsWarper(float(np.float32(t)))(None, x.double())
        if m:
            scores = MinPLogitsWarper(m)(None, scores)
        if k:
            scores = TopKLogitsWarper(k)(None, scores)
        if p < 1:
            scores = TopPLogitsWarper(p)(None, scores)
        u = torch.from_numpy(np.random.default_rng(7).random(n))
        want = (scores.softmax(-1).cumsum(-1) > u[:, None]).int().argmax(-1)
        assert draw(x, u, t, k, p, m).tolist() == want.tolist(), (t, m, k, p)


def test_repetition_edit_equals_the_processor_of_transformers():
    x = normal(3, 2, 50) * 4
    context = torch.tensor([[1, 4, 4, 9], [0, 49, 2, 3]])
    want = RepetitionPenaltyLogitsProcessor(1.3)(context, x.clone())
    distinct = [sorted(set(c)) for c in context.tolist()]
    row = torch.tensor([i for i, c in enumerate(distinct) for _ in c], dtype=torch.int32)
    token = torch.tensor([t for c in distinct for t in c], dtype=torch.int32)
    zero = torch.zeros(len(row))
    assert torch.allclose(run(edit_logits, x, row, token, zero, zero + 1.3, zero), want)


@pytest.mark.parametrize("v", [49_152, 151_936])
def test_kernel_and_reference_agree_on_real_vocabularies(v: int):
    x = normal(11, 6, v) * torch.tensor([0.5, 1.0, 3.0, 5.0, 8.0, 2.0])[:, None]
    u = torch.from_numpy(np.random.default_rng(5).random(6))
    draw(x, u)
    draw(x, u, 0.8, [50, 0, 1, 2000, v, -1], [0.9, 0.95, 0.5, 0.999, 1.0, 0.3], [0, 0.01, 0, 0, 0.5, 0])
    run(greedy, x)


def test_samples_follow_the_distribution():
    n = 100_000
    row = normal(1, 1, 20)
    u = torch.from_numpy(np.random.default_rng(2).random(n))
    times = np.bincount(draw(row.expand(n, -1).contiguous(), u, 1.7), minlength=20)
    want = (row[0].double() / float(np.float32(1.7))).softmax(-1).numpy() * n
    assert chisquare(times, want).pvalue > 0.001


# ---- cases from the field -----------------------------------------------------------------------------------------


def test_b02_top_k_of_minus_one_zero_v_and_more_are_all_off():
    n, v = 20_000, 12
    row = normal(4, 1, v)
    u = torch.from_numpy(np.random.default_rng(3).random(n))
    x = row.expand(n, -1).contiguous()
    tokens = [draw(x, u, 1.5, k) for k in (-1, 0, v, 10 * v)]
    assert all(torch.equal(tokens[0], t) for t in tokens)
    assert len(tokens[0].unique()) == v
    want = (row[0].double() / 1.5).softmax(-1).numpy() * n
    assert chisquare(np.bincount(tokens[0], minlength=v), want).pvalue > 0.001


def test_b03_top_p_just_below_one_keeps_everything():
    v = 32_000
    x = normal(6, 4, v)
    u = torch.tensor([1e-12, 0.5, 0.999_999_9, 1 - 2.0**-53], dtype=torch.float64)
    whole = draw(x, u)
    mixed = draw(torch.cat([x, x]), torch.cat([u, u]), top_p=[0.9999999] * 4 + [0.9] * 4)
    assert torch.equal(mixed[:4], whole)
    assert int(mixed.max()) < v and int(mixed.min()) >= 0
    assert int(whole[3]) == v - 1                      # the very last id is still within reach


def test_b03_on_overflow_the_last_kept_token_is_taken():
    x = torch.full((1, 300), -torch.inf)
    x[0, [3, 200]] = 0.0
    assert draw(x, 1.0).tolist() == [200]
    x[0, :100] = 0.1
    assert draw(x, 1.0, top_k=100).tolist() == [99]


@pytest.mark.parametrize("cold", [-1.0, 0.0, 1e-6, float("nan")])
def test_b04_a_greedy_row_with_masked_logits_divides_nothing(cold: float):
    x = normal(8, 2, 64)
    x[0, :60] = -torch.inf
    with np.errstate(all="raise"):
        token = draw(x, 0.3, [cold, 0.8])
    assert int(token[0]) == int(x[0].argmax())


def test_a_temperature_of_exactly_1e_5_still_draws():
    assert len(draw(torch.zeros(1000, 4), U, 1e-5).unique()) == 4


@pytest.mark.parametrize("fill", [-torch.inf, torch.nan])
def test_rows_without_a_number_give_token_zero(fill: float):
    x = torch.full((3, 70), fill)
    x[:, 0] = torch.nan
    assert run(greedy, x).tolist() == [0, 0, 0]
    assert draw(x, 0.7, [0.0, 0.8, 0.8], [0, 5, 0], [1.0, 1.0, 0.5]).tolist() == [0, 0, 0]


def test_nan_is_never_chosen_and_infinity_always():
    x = normal(9, 1, 100)
    x[0, ::2] = torch.nan
    assert all(t % 2 for t in draw(x.expand(1000, -1).contiguous(), U).tolist())
    assert all(t % 2 for t in draw(x.expand(1000, -1).contiguous(), U, 1.0, 60, 0.9).tolist())
    assert int(run(greedy, x)[0]) == int(x.nan_to_num(-torch.inf).argmax())
    x[0, [41, 43]] = torch.inf
    assert draw(x, 0.99).tolist() == [41] == run(greedy, x).tolist()


def test_greedy_takes_the_lowest_of_equals():
    assert run(greedy, torch.tensor([[1.0, 3.0, 3.0], [0.0, -0.0, 0.0]])).tolist() == [1, 0]


def test_b05_a_row_ignores_its_batch_order_and_padding():
    r, v = 9, 1031
    x, u = normal(12, r, v) * 2, torch.from_numpy(np.random.default_rng(1).random(r))
    top_k = torch.arange(r, dtype=torch.int32) * 5 - 2
    columns = [torch.linspace(0, 1.5, r), top_k, torch.linspace(0.3, 1.1, r), torch.zeros(r)]
    alone = torch.cat([draw(x[i : i + 1], u[i], *(c[i] for c in columns)) for i in range(r)])
    order = torch.randperm(r, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(x[order], u[order], *(c[order] for c in columns)), alone[order])
    for junk in (0.0, 1e30, torch.nan):
        padded = torch.cat([x, torch.full((4, v), junk)])
        more = [torch.cat([c, c[:4]]) for c in (u, *columns)]
        assert torch.equal(draw(padded, *more)[:r], alone)


# ---- edits and the tokens on the device ---------------------------------------------------------------------------


def test_a_bias_of_minus_infinity_bans_whatever_the_logit():
    x = torch.tensor([[1.0, torch.inf, -3.0]])
    zero, ones = torch.zeros(2, dtype=torch.int32), torch.ones(2)
    banned = run(edit_logits, x, zero, torch.tensor([1, 2], dtype=torch.int32), -torch.inf * ones, 1.5 * ones, ones)
    assert banned[0].tolist() == [1.0, -torch.inf, -torch.inf]


def test_bias_comes_before_the_repetition_penalty():
    one = torch.ones(1)
    x = run(edit_logits, torch.tensor([[-1.0, 0.0]]), *2 * (torch.zeros(1, dtype=torch.int32),), 3 * one, 2 * one, one)
    assert x[0].tolist() == [(-1.0 + 3.0) / 2.0 - 1.0, 0.0]


def test_edits_leave_the_given_logits_and_other_entries_alone():
    x = normal(2, 3, 7)
    before, none = x.clone(), torch.full((1,), -1, dtype=torch.int32)
    one = torch.ones(1)
    assert torch.equal(edit_logits(x, none, none + 3, one, 2 * one, one), before)
    edited = edit_logits(x, none + 2, none + 3, one, one, 0 * one)
    assert torch.equal(x, before) and int((edited != before).sum()) == 1


def test_codes_of_the_host_stand_for_tokens_on_the_device():
    last = torch.tensor([10, 11, 12], dtype=torch.int32)
    assert run(take_tokens, torch.tensor([5, -1, 0, -3, -2], dtype=torch.int32), last).tolist() == [5, 10, 0, 12, 11]
    rows = torch.tensor([2, -1, 0], dtype=torch.int32)
    assert run(put_tokens, last, rows, torch.tensor([7, 8, 9], dtype=torch.int32)).tolist() == [9, 11, 7]
    assert last.tolist() == [10, 11, 12]


@pytest.mark.parametrize("bad", [-4, -100])
def test_checked_mode_names_a_code_of_no_row(bad: int):
    with using(Checked(CPU)), pytest.raises(CheckFailed, match=f"{bad}"):
        take_tokens(torch.tensor([bad], dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
