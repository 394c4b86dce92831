"""What a request may ask for, and the columns and edits that follow; edits against the field's processors."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from afl.errors import RequestError
from afl.ops.sample import edit_logits
from afl.run.edits import RowEdits
from afl.run.philox import uniforms_plain
from afl.run.sampling import SampleTable, SamplingParams, pad_rows

V = 40


def problems(**given) -> list[str]:
    """Lines of the refusal, or none."""
    try:
        SamplingParams(**given).validate(V, 64)
    except RequestError as e:
        text = str(e).splitlines()
        return text[1:] if len(text) > 1 else text
    return []


# ---- parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fine", [
    {}, {"temperature": -1}, {"temperature": 0.7, "top_k": -1, "top_p": 1, "min_p": 0}, {"top_k": 10 * V},
    {"seed": 2**64 - 1},
    {"logprobs": -1}, {"logprobs": 0}, {"logprobs": V}, {"logit_bias": {0: -100, V - 1: 100.0}}, {"stop": "one string"},
    {"stop_ids": np.array([1, 2])}, {"bad_words_ids": [[1], [2, 3]]}, {"min_tokens": 5, "max_tokens": 5}, {"n": 8},
    {"min_tokens": 64},
], ids=str)
def test_a_valid_request_passes(fine):
    assert problems(**fine) == []


NAN = float("nan")


INF = float("inf")
WRONG = {
    "max_tokens": (0, 1.5, True, "9"), "temperature": (-0.5, NAN, INF, "hot", None), "top_k": (-2, 2.0),
    "top_p": (0, 1.01, NAN), "min_p": (-0.1, 2), "repetition_penalty": (0, -1, NAN), "frequency_penalty": (2.1,),
    "presence_penalty": (-2.1,), "min_tokens": (-1, 65), "stop": (("",), (3,), 3), "stop_ids": ((V,), (-1,), 7, "7"),
    "bad_words_ids": (((),), ((V,),), (3,), 3), "logit_bias": ({V: 1.0}, {"3": 1.0}, {3: NAN}, {3: 101}, [3]),
    "ignore_eos": (1,), "include_stop": ("no",), "logprobs": (-2, V + 1, True), "seed": (-1, 2**64), "n": (0, 1e9),
}


@pytest.mark.parametrize("name, value", [(name, v) for name, values in WRONG.items() for v in values])
def test_an_invalid_request_is_refused_by_name(name, value):
    found = problems(**{name: value})
    assert len(found) == 1 and name in found[0], found


def test_all_problems_are_listed_at_once():
    found = problems(temperature=-3, top_p=5, n=0, stop_ids=(V, V + 1), max_tokens="many", min_tokens=3)
    assert len(found) == 6
    assert all(f.startswith("  - ") for f in found)


def test_b09_a_bias_outside_the_vocabulary_names_the_id():
    with pytest.raises(RequestError, match="191222.*128255"):
        SamplingParams(logit_bias={191_222: 5.0}).validate(128_256, 4096)


def test_parameters_are_greedy_unless_something_asks_for_more():
    assert SamplingParams().plain and SamplingParams(temperature=1e-6, top_p=0.5).plain
    assert not SamplingParams(temperature=0.5).plain
    assert not SamplingParams(logit_bias={1: 1.0}).plain


@pytest.mark.parametrize("given, needs", [
    ({}, False), ({"temperature": 1.0, "seed": 3, "top_p": 0.5}, False), ({"logit_bias": {1: 2.0}}, False),
    ({"repetition_penalty": 1.3}, True), ({"frequency_penalty": 0.1}, True), ({"presence_penalty": -0.1}, True),
    ({"bad_words_ids": [[1, 2]]}, True), ({"min_tokens": 3}, True), ({"bad_words_ids": [[1]]}, False),
], ids=str)
def test_b06_rows_that_depend_on_earlier_tokens_say_so(given, needs: bool):
    assert SamplingParams(**given).needs_host is needs


def test_children_of_a_request_count_their_seeds_up():
    p = SamplingParams(n=3, seed=2**64 - 1, temperature=1.0)
    assert [p.child(i).seed for i in range(3)] == [2**64 - 1, 0, 1]
    assert all(p.child(i).n == 1 for i in range(3))
    assert attrs.evolve(p, seed=None).child(2).seed is None


def test_the_generation_config_decides_between_greedy_and_sampling():
    listed = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [1, 2]}
    assert SamplingParams.of(listed | {"do_sample": False}) == SamplingParams(repetition_penalty=1.05)
    assert SamplingParams.of(listed) == SamplingParams(repetition_penalty=1.05)
    sampled = SamplingParams.of(listed | {"do_sample": True, "min_p": None})
    assert sampled == SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
    assert SamplingParams.of({"do_sample": True}).temperature == 1.0
    assert SamplingParams.of({"max_new_tokens": 9}).max_tokens == 9


def test_what_the_caller_gives_wins_over_the_generation_config():
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert SamplingParams.of(config, temperature=0.0).plain
    assert SamplingParams.of(config, top_p=0.5, temperature=None) == SamplingParams(temperature=0.6, top_p=0.5)
    assert SamplingParams.of({}, top_k=5).temperature == 1.0
    with pytest.raises(RequestError, match="temprature.*did you mean 'temperature'"):
        SamplingParams.of({}, temprature=1.0)


# ---- edits --------------------------------------------------------------------------------------------------------


def edited(logits: torch.Tensor, p: SamplingParams, prompt: list[int], outputs: list[int], stops=()) -> torch.Tensor:
    """Row `logits` [v] after the edits of a request that has come this far."""
    ids, *rest = RowEdits(p, len(prompt), tuple(stops)).now(np.array(prompt + outputs, np.int32))
    assert len(set(ids.tolist())) == len(ids), "two entries for one id"
    row = torch.zeros(len(ids), dtype=torch.int32)
    return edit_logits(logits[None], row, *map(torch.from_numpy, (ids, *rest)))[0]


def by_hand(logits: list[float], p: SamplingParams, prompt: list[int], outputs: list[int], stops) -> list[float]:
    """The order of the specification, one token at a time."""
    out = []
    for i, x in enumerate(np.float32(logits)):
        words = [w for w in p.bad_words_ids if w[-1] == i]
        for n, w in ((len(w) - 1, w) for w in words):
            if n == 0 or len(outputs) >= n and outputs[-n:] == list(w[:-1]):
                x = -np.inf
        if i in stops and len(outputs) < p.min_tokens:
            x = -np.inf
        x = x + p.logit_bias.get(i, 0.0)
        if i in prompt or i in outputs:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        times = outputs.count(i)
        out.append(float(x - p.frequency_penalty * times - p.presence_penalty * (times > 0)))
    return out


tokens = st.lists(st.integers(0, 11), max_size=12)
requests = st.builds(
    SamplingParams, repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.25]), min_tokens=st.integers(0, 4),
    logit_bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, 1.5, 3.0]), max_size=3),
    bad_words_ids=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
)


@settings(max_examples=200, deadline=None)
@given(requests, tokens.filter(len), tokens, st.frozensets(st.integers(0, 11), max_size=3), st.integers(0, 1000))
def test_edits_equal_the_rules_applied_by_hand(p, prompt, outputs, stops, seed):
    logits = np.random.default_rng(seed).standard_normal(12).astype(np.float32)
    got = edited(torch.from_numpy(logits), p, prompt, outputs, stops)
    assert got.tolist() == pytest.approx(by_hand(logits.tolist(), p, prompt, outputs, stops), abs=1e-5)


@settings(max_examples=200, deadline=None)
@given(requests, tokens.filter(len), tokens, st.frozensets(st.integers(0, 11), max_size=3), st.sets(st.integers(0, 12)))
def test_edits_kept_token_by_token_equal_edits_made_anew(p, prompt, outputs, stops, looked):
    """However often, and after however many tokens, a row is looked at."""
    kept, whole = RowEdits(p, len(prompt), tuple(stops)), np.array(prompt + outputs, np.int32)
    x = torch.linspace(-2, 2, 12)
    for n in range(len(outputs) + 1):
        if n in looked or n == len(outputs):
            ids, *rest = kept.now(whole[: len(prompt) + n])
            entries = map(torch.from_numpy, (ids, *rest))
            got = edit_logits(x[None], torch.zeros(len(ids), dtype=torch.int32), *entries)[0]
            assert torch.equal(got, edited(x, p, prompt, outputs[:n], stops))


def test_edits_equal_the_processors_of_transformers():
    rng = np.random.default_rng(0)
    for _ in range(20):
        prompt, outputs = rng.integers(0, V, 9).tolist(), rng.integers(0, V, 6).tolist()
        x = torch.from_numpy(rng.standard_normal(V).astype(np.float32)) * 3
        context = torch.tensor([prompt + outputs])
        want = RepetitionPenaltyLogitsProcessor(1.2)(context, x[None].clone())[0]
        assert torch.allclose(edited(x, SamplingParams(repetition_penalty=1.2), prompt, outputs), want)
        words = [[5], outputs[-2:] + [7], outputs[-1:] + [8], [outputs[-1] ^ 1, 9], outputs[-3:]]
        want = NoBadWordsLogitsProcessor(words)(torch.tensor([outputs]), x[None].clone())[0]
        assert torch.equal(edited(x, SamplingParams(bad_words_ids=words), prompt, outputs), want)
        bias = {3: 2.5, 4: -7.0}
        want = SequenceBiasLogitsProcessor({(i,): b for i, b in bias.items()})(context, x[None].clone())[0]
        assert torch.equal(edited(x, SamplingParams(logit_bias=bias), prompt, outputs), want)
        for least in (5, 6, 7):
            want = MinNewTokensLengthLogitsProcessor(len(prompt), least, [2, 7])(context, x[None].clone())[0]
            assert torch.equal(edited(x, SamplingParams(min_tokens=least), prompt, outputs, (2, 7)), want)


def test_the_frequency_penalty_of_the_specification():
    p = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.3)
    assert edited(torch.tensor([2.0, -1.0, 0.5]), p, [1], [0, 0]).tolist() == pytest.approx([-0.3, -2.0, 0.5], abs=1e-6)


def test_b06_a_penalty_sees_the_token_of_the_step_just_before():
    p, row = SamplingParams(repetition_penalty=1.3), np.array([4, 5, 6], np.int32)
    kept = RowEdits(p, 2, ())
    assert set(kept.now(row[:2])[0].tolist()) == {4, 5}
    assert set(kept.now(row)[0].tolist()) == {4, 5, 6}


def test_b13_every_end_token_is_held_back_for_min_tokens():
    p, x = SamplingParams(min_tokens=5), torch.zeros(V)
    x[7], x[2] = 9.0, 8.0
    for n in range(7):
        got = edited(x, p, [1, 2, 7], [3] * n, (2, 7))
        assert bool(got[[2, 7]].isneginf().all()) is (n < 5)
        assert int(got.argmax()) == (0 if n < 5 else 7)


def test_edits_cost_what_is_new_not_what_is_known():
    """No pass over the whole row: the tokens that are read again are the last few."""

    class Row(np.ndarray):
        read = 0

        def __getitem__(self, key):
            out = super().__getitem__(key)
            Row.read += out.size
            return out

    kept, known = RowEdits(SamplingParams(repetition_penalty=1.1), 5000, ()), np.arange(5100, dtype=np.int32).view(Row)
    kept.now(known[:5001])
    Row.read = 0
    kept.now(np.asarray(known)[:5002].view(Row))
    assert Row.read <= 8, f"{Row.read} elements were taken from the row"


# ---- columns of a step --------------------------------------------------------------------------------------------


def table() -> SampleTable:
    t = SampleTable(8)
    t.set(5, SamplingParams(temperature=0.8, top_k=10**6, top_p=0.9, min_p=0.1, logprobs=0), 42, 3, ())
    t.set(2, SamplingParams(), 7, 3, ())
    t.set(6, SamplingParams(logit_bias={3: 1.0}, logprobs=4), 9, 3, ())
    return t


def test_a_step_gets_the_columns_of_its_rows_in_plan_order():
    rows, at = np.array([6, 5, 2], np.int32), np.array([11, 12, 13], np.int32)
    got, edits = table().pack(rows, at, np.ones(3, bool), {6: np.array([1, 2, 3], np.int32)})
    assert got.temperature.tolist() == [0.0, float(np.float32(0.8)), 0.0]
    assert got.top_k[1] == 10**6 and got.top_p[1] == float(np.float32(0.9)) and got.min_p[1] == float(np.float32(0.1))
    assert float(got.u[1]) == uniforms_plain(np.array([42], np.uint64), np.array([12]))[0]
    assert (edits.row.tolist(), edits.token.tolist(), edits.bias.tolist()) == ([0], [3], [1.0])
    f32 = torch.float32
    assert [x.dtype for x in attrs.astuple(got)] == [f32, torch.int32, f32, f32, torch.float64]


def test_steps_without_draws_or_edits_are_told_by_one_column():
    t = table()
    assert t.special[[5, 6]].all() and not t.special[2]
    assert t.scored[[5, 6]].all() and not t.scored[2]
    assert t.logprobs[[5, 6]].tolist() == [0, 4]
    t.set(5, SamplingParams(temperature=1e-7), 1, 1, ())
    assert not t.special[5] and not t.scored[5]


def test_b05_a_seeded_row_packs_the_same_in_any_company():
    t, one = table(), np.ones(1, bool)
    alone = t.pack(np.array([5]), np.array([12]), one, {})[0]
    for rows in ([5, 2], [2, 5], [2, 2, 5]):
        at = np.where(np.array(rows) == 5, 12, 99)
        mixed = t.pack(np.array(rows), at, np.ones(len(rows), bool), {})[0]
        i = rows.index(5)
        assert all(a[i] == b[0] for a, b in zip(attrs.astuple(mixed), attrs.astuple(alone), strict=True))


def test_b12_a_row_that_takes_no_token_yet_draws_and_edits_nothing():
    t = SampleTable(1)
    t.set(0, SamplingParams(temperature=0.8, repetition_penalty=1.2), 42, 9, ())
    rows = np.zeros(1, np.int32)
    whole = np.arange(9, dtype=np.int32)
    chunk, edits = t.pack(rows, np.array([4]), np.zeros(1, bool), {})
    assert chunk.temperature.tolist() == [0.0] and len(edits.row) == 0 and t.edits[0].seen == 0
    last, edits = t.pack(rows, np.array([9]), np.ones(1, bool), {0: whole})
    assert float(last.u[0]) == uniforms_plain(np.array([42], np.uint64), np.array([9]))[0]
    assert sorted(edits.token.tolist()) == whole.tolist()
    assert t.temperature.tolist() == [float(np.float32(0.8))]


def test_a_row_that_changes_hands_forgets_the_former_edits():
    t = SampleTable(1)
    t.set(0, SamplingParams(logit_bias={3: 1.0}), 1, 1, ())
    t.set(0, SamplingParams(temperature=1.0), 1, 1, ())
    assert len(t.pack(np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1, bool), {})[1].row) == 0


def test_padding_adds_greedy_rows_and_edits_of_no_row():
    got, edits = table().pack(np.array([5]), np.array([1]), np.ones(1, bool), {})
    rows, more = pad_rows(got, edits, 3, 2)
    assert rows.temperature.tolist()[1:] == [0.0, 0.0] and rows.u.dtype == torch.float64
    x = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    assert more.row.tolist() == [-1, -1]
    assert torch.equal(edit_logits(x, *attrs.astuple(more)), x)
