"""Every way to run a model gives the same tokens: one table of combinations over a tiny model."""

import itertools

import attrs
import pytest

from afl import chip as chips
from afl import plugins
from afl.chip import Limits
from afl.run.generate import stream
from afl.run.load import random_model
from afl.run.sampling import SamplingParams

SIZES = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=61,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
PROMPTS = [[5], [7, 3, 9, 11, 2, 1, 4, 8, 6], [1, 2, 3], [60] * 14, [9, 8, 7, 6, 5]]
NEW = 9
MODES = {
    "program": {},
    "eager": {"eager": True},
    "references": {"references": True},
    "checked": {"checked": True},
    "padded": {"chip": "cpu_buckets"},
}
BATCHES = {
    "alone": {"max_seqs": 1},
    "mixed": {"max_seqs": 5},
    "preempted": {"max_seqs": 5, "kv_blocks": 9, "block_tokens": 4, "max_model_len": 32},
}
SAMPLING = {
    "greedy": {},
    "seeded": {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "seed": 11},
    "penalised": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "min_tokens": 4,
        "stop_ids": (3, 17),
        "bad_words_ids": ((5,), (7, 9)),
    },
}


@pytest.fixture(scope="module")
def bucket_chip():
    """The host processor with buckets and padding in place of ranges, as a chip that captures graphs has them."""
    made = attrs.evolve(plugins.chip("cpu"), name="cpu_buckets", limits=Limits(block_tokens=(16, ()), graph_streams=64))
    yield chips.register(made)
    chips._CHIPS.pop("cpu_buckets")


@pytest.fixture(scope="module")
def models(bucket_chip):
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {k: random_model(v, SIZES, seed=3) for k, v in names.items()}


@pytest.fixture(scope="module")
def alone(models):
    """The truth: each prompt by itself, reference bodies, one step at a time, nothing traced."""
    return {
        (name, s): run(m, SAMPLING[s], eager=True, references=True, depth=1, max_seqs=1, max_step_tokens=64)
        for name, m in models.items()
        for s in SAMPLING
    }


def run(model, sampling, **options):
    if "chip" in options:
        model = attrs.evolve(model, chip=plugins.chip(options["chip"]))
    engine = model.engine(**{"max_model_len": 64, "max_step_tokens": 64, **options})
    got = {}
    for piece in stream(engine, PROMPTS, SamplingParams(max_tokens=NEW, **sampling)):
        assert piece.done.error is None, piece.done.error
        got[piece.index] = piece.done.token_ids
    if options.get("kv_blocks"):
        assert engine.sched.preemptions > 0, "the combination must preempt, or it tests nothing"
    return [got[i] for i in range(len(PROMPTS))]


COMBINATIONS = [
    (arch, mode, depth, chunk, batch, sampling)
    for arch, mode, depth, chunk, batch, sampling in itertools.product(
        ("llama", "qwen3"), MODES, (1, 2), (5, 64), BATCHES, SAMPLING
    )
    # half of the table, each pair of choices still in it
    if mode == "program" or (len(mode) + depth + chunk + len(batch) + len(sampling) + len(arch)) % 2 == 0
]


def test_the_table_is_large_enough():
    assert len(COMBINATIONS) >= 200


@pytest.mark.parametrize("arch,mode,depth,chunk,batch,sampling", COMBINATIONS)
def test_all_paths_give_the_same_tokens(models, alone, arch, mode, depth, chunk, batch, sampling):
    got = run(models[arch], SAMPLING[sampling], depth=depth, max_step_tokens=chunk, **MODES[mode], **BATCHES[batch])
    assert got == alone[arch, sampling]


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("sampling", SAMPLING)
def test_threads_do_not_change_tokens(models, alone, threads, sampling):
    try:
        assert (
            run(models["llama"], SAMPLING[sampling], depth=2, threads=threads, max_seqs=5) == alone["llama", sampling]
        )
    finally:
        import torch

        torch.set_num_threads(2)


SMALL = "bfloat16", "int8", "int8-channel", "int8-dynamic", "int4", "int4-sym", "int4-dynamic"


@pytest.mark.parametrize("weights", SMALL)
def test_all_paths_give_the_same_tokens_with_small_weights(weights, bucket_chip):
    """The truth is the same model alone by reference bodies, which decode the weights first."""
    model = random_model("LlamaForCausalLM", SIZES, seed=3, weights=weights)
    for sampling in ("greedy", "seeded"):
        want = run(model, SAMPLING[sampling], eager=True, references=True, depth=1, max_seqs=1, max_step_tokens=64)
        for mode, depth, chunk, batch in (
            ("program", 1, 64, "alone"), ("program", 2, 5, "mixed"), ("program", 2, 64, "preempted"),
            ("padded", 2, 64, "mixed"),
        ):
            options = {"depth": depth, "max_step_tokens": chunk, **MODES[mode], **BATCHES[batch]}
            assert run(model, SAMPLING[sampling], **options) == want, (sampling, options)
