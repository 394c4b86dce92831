"""Engines that replay captured graphs on emulated NPU chips: the tokens of op by op, and figures about the graphs."""

from typing import Any

import attrs
import pytest
import torch

from afl import chip as chips
from afl import plugins
from afl.chip import F, Limits
from afl.errors import ConfigError
from afl.run.load import random_model
from afl.run.sampling import SamplingParams

SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=256, tie_word_embeddings=False,
)
OPTIONS = {"max_seqs": 5, "max_step_tokens": 64, "max_model_len": 192}
PROMPTS = [[5], [7, 3, 9, 11, 2, 1, 4], [60] * 14, [i % 59 for i in range(124)], [i * 7 % 61 for i in range(30)],
           [8, 8], [3, 1, 4, 1, 5]]
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 1.3, "top_k": 20, "seed": 11}, {"logprobs": 3}, {"repetition_penalty": 1.4, "logprobs": 0},
]

plugins.load_ops()
NPUS = [c.name for c in chips.registered().values() if F.NPU in c.features]
CAPTURING = [c.name for c in chips.registered().values() if F.FIA in c.features]


@pytest.fixture(scope="module")
def model():
    made: dict[str, Any] = {}

    def get(chip: str) -> Any:
        if chip not in made:
            made[chip] = random_model("LlamaForCausalLM", SIZES, seed=3, chip=chip)
        return made[chip]

    return get


def serve(engine: Any, requests: list[tuple[list[int], dict[str, Any]]]) -> dict[str, Any]:
    """id -> tokens and what was said about their log-probabilities; requests arrive while others run."""
    waiting = [(str(i), p, s) for i, (p, s) in enumerate(requests)]
    got: dict[str, Any] = {id: ([], []) for id, _, _ in waiting}
    while engine.busy or waiting:
        if waiting and (engine.steps % 2 == 0 or not engine.busy):
            id, prompt, sampling = waiting.pop(0)
            engine.submit(prompt, SamplingParams(ignore_eos=True, **sampling), id)
        result = engine.step()
        for id, token, _ in result.outputs.rows():
            if token >= 0:
                got[id][0].append(token)
        for id, p in result.logprobs.items():
            got[id][1].append((p.logprob, tuple(p.top)))
    return got


def stream_of_requests(more: int = 0) -> list[tuple[list[int], dict[str, Any]]]:
    return [(p, {"max_tokens": 5 + 3 * i} | KINDS[(i + more) % 4]) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("chip", CAPTURING)
@pytest.mark.parametrize("depth", [1, 2])
def test_replayed_steps_give_the_tokens_of_eager_ones_through_all_buckets(model, chip, depth):
    want = serve(model(chip).engine(**OPTIONS, eager=True, depth=1), stream_of_requests(depth))
    engine = model(chip).engine(**OPTIONS, graphs="on", depth=depth)
    traces = engine.traces
    assert serve(engine, stream_of_requests(depth)) == want
    graphs = engine.graphs
    used = {dict(p.sizes)["rows"] for p, c in graphs.captured.items() if c.arena is not None}
    assert used == {1, 2, 4, 5} and graphs.replays > 20 and graphs.programs > 0
    m = engine.metrics()
    assert m["graphs"] == len(graphs.captured) == 4 * (1 + 4)
    assert m["graph_replays"] + m["graph_programs"] == engine.steps
    assert m["graph_bytes"] == max(p.program.plan.peak for p in graphs.captured) and m["graph_input_bytes"] > 0
    assert engine.traces - traces <= 16, "the buckets of prefill only"
    again = serve(engine, stream_of_requests(depth))
    assert {k: v[0] for k, v in again.items()} == {k: v[0] for k, v in want.items()}


@pytest.mark.parametrize("chip", CAPTURING)
def test_d06_captured_once_and_equal_to_eager_at_every_length(model, chip):
    """Lengths 10 to 40, and across the border of a cache block of 128."""
    for first, n in ((10, 31), (125, 6)):
        prompt = [(7 * i + 3) % 61 for i in range(first)]
        one = [(prompt, {"max_tokens": n, "logprobs": -1})]
        options = {"max_seqs": 1, "max_model_len": 192, "max_step_tokens": 192}
        engine = model(chip).engine(**options, graphs="on")
        captured = engine.metrics()["graphs"]
        assert serve(engine, one) == serve(model(chip).engine(**options, eager=True, depth=1), one)
        assert engine.metrics()["graph_replays"] == n - 1 and engine.metrics()["graphs"] == captured


def test_d05_more_requests_than_the_largest_bucket_and_a_sequence_longer_than_a_step(model):
    requests = [([i, 3, i + 1], {"max_tokens": 9}) for i in range(17)] + [([4] * 90, {"max_tokens": 12})]
    options = {"max_seqs": 16, "max_step_tokens": 16, "max_model_len": 128}
    want = serve(model("a3").engine(**options, eager=True, depth=1), requests)
    engine = model("a3").engine(**options, graphs="on")
    assert max(dict(p.sizes)["rows"] for p in engine.graphs.captured) == 16
    assert serve(engine, requests) == want
    m = engine.metrics()
    assert m["graph_replays"] > 0 and m["graph_programs"] > 0


def test_past_the_largest_captured_size_the_program_runs_and_leaves_its_state_where_graphs_find_it(model):
    """Logit edits beyond the largest bucket of edits do not exist here, so prefill stands for what is not captured."""
    engine = model("a3").engine(**OPTIONS, graphs="on", depth=1)
    homes = [x.data_ptr() for x in engine.leaves]
    engine.submit([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    kinds = []
    while engine.busy:
        before = engine.graphs.replays
        engine.step()
        kinds.append(engine.graphs.replays > before)
        assert [x.data_ptr() for x in engine.leaves] == homes
    assert kinds[0] is False and kinds[1:4] == [True] * 3
    away = [x.clone() + 1 for x in engine.leaves]
    with torch.inference_mode():
        back = engine.graphs.home(engine.leaves, away)
    assert [x.data_ptr() for x in back] == homes and all(torch.equal(x, y) for x, y in zip(back, away, strict=True))


def test_310p_is_refused_by_name_when_graphs_are_asked_for_and_runs_its_programs_otherwise(model):
    refused = sorted(set(NPUS) - set(CAPTURING))
    assert refused == ["310p"]
    with pytest.raises(ConfigError) as e:
        model("310p").engine(**OPTIONS, graphs="on")
    text = str(e.value)
    assert "<kernel linear/npu_linear_nz> is not capturable: %" in text
    assert "<kernel paged_attention/atb_nz> is not capturable" in text and "graphs 'auto' or 'off'" in text
    engine = model("310p").engine(**OPTIONS)
    assert engine.metrics()["graphs"] == 0 and "only if asked for" in str(engine.graphs)


@pytest.mark.parametrize(("chip", "options", "why"), [
    ("cpu", {}, "chip 'cpu' captures no graphs"), ("a3", {"eager": True}, "eager was asked for"),
    ("a3", {"checked": True}, "checked was asked for"), ("a3", {"references": True}, "references was asked for"),
])
def test_what_cannot_go_with_graphs_is_said(model, chip, options, why):
    with pytest.raises(ConfigError, match=why):
        model(chip).engine(**OPTIONS, graphs="on", **options)
    for graphs in ("auto", "off"):
        engine = model(chip).engine(**OPTIONS, graphs=graphs, **options)
        assert not engine.graphs.captured and str(engine.graphs).startswith("none: ")


def test_a_value_of_graphs_that_does_not_exist_is_refused_with_the_nearest(model):
    with pytest.raises(ConfigError, match="unknown value of graphs 'onn'; did you mean 'on'"):
        model("a3").engine(graphs="onn")


def test_a_chip_without_kernels_that_can_be_captured_names_the_host_operands():
    cpu = plugins.chip("cpu")
    made = chips.register(attrs.evolve(cpu, name="cpu_graphs", limits=Limits(block_tokens=(16, ()), graph_streams=8)))
    try:
        m = random_model("LlamaForCausalLM", SIZES, seed=3)
        with pytest.raises(ConfigError, match="captures no graphs of this model|cannot be captured"):
            attrs.evolve(m, chip=made).engine(**OPTIONS, graphs="on")
    finally:
        chips._CHIPS.pop("cpu_graphs")
