"""D06 and I08 on every NPU chip, emulated."""

import pytest

from afl import plugins
from afl.chip import F, registered
from afl.run.load import random_model
from afl.run.sampling import SamplingParams

SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=256, tie_word_embeddings=False,
)


def chips():
    plugins.load_ops()
    return [(c.name, d) for c in registered().values() if F.NPU in c.features for d in c.dtypes]


CHIPS = chips()


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(chip, dtype):
        if (chip, dtype) not in made:
            made[chip, dtype] = random_model("LlamaForCausalLM", SIZES, seed=3, chip=chip, dtype=dtype)
        return made[chip, dtype]

    return get


@pytest.mark.parametrize("chip,dtype", CHIPS)
def test_d06_one_trace_holds_for_every_length(models, chip, dtype):
    """Traced at ten tokens, run at 11 to 40, over a border of nothing but lengths: equal to eager at each."""
    model, prompt = models(chip, dtype), [[5, 1, 9, 2, 7, 3, 8, 4, 6, 11]]
    (want,) = model.generate(prompt, options={"eager": True}, max_tokens=31, ignore_eos=True)
    engine = model.engine()
    engine.submit(prompt[0], SamplingParams(max_tokens=31, ignore_eos=True), "r")
    got = []
    while engine.busy:
        got += [t for _, t, _ in engine.step().outputs.rows()]
    assert tuple(got) == want.token_ids and len(got) == 31
    assert engine.traces == 2                        # the prompt and the decodes


@pytest.mark.parametrize("chip,dtype", CHIPS)
def test_i08_seeded_requests_draw_the_tokens_of_the_cpu_chip_whatever_runs_beside_them(models, chip, dtype):
    """Noise comes from (seed, place) alone.  In float16 the logits of both differ far less than the draws."""
    prompts = [[7, 3, 9, 11], [5], [60] * 9]
    how = dict(max_tokens=9, temperature=3.0, ignore_eos=True)
    model, cpu = models(chip, dtype), models("cpu", dtype)
    alone = [[list(m.generate([p], seed=seed, **how)[0].token_ids) for m in (model, cpu)]
             for seed, p in enumerate(prompts)]
    assert dtype == "bfloat16" or all(a == b for a, b in alone)
    engine = model.engine(max_seqs=3)
    for seed, p in enumerate(prompts):
        engine.submit(p, SamplingParams(seed=seed, **how), str(seed))
    got = {}
    while engine.busy:
        for id, token, _ in engine.step().outputs.rows():
            got.setdefault(id, []).append(token)
    assert [got[str(i)] for i in range(3)] == [a for a, _ in alone]
    assert len({tuple(x) for x in got.values()}) == 3


def test_b08_more_rows_than_a_launch_takes_give_what_they_give_apart(models):
    """384 rows of penalties: no launch of a kernel of our own is limited, and nothing depends on the number of rows."""
    model = models("310p", "float16")
    prompts = [[1 + i % 50, 2 + i % 30] for i in range(384)]
    how = dict(max_tokens=2, repetition_penalty=1.5, frequency_penalty=0.5, ignore_eos=True)
    options = {"max_seqs": 384, "max_step_tokens": 1024, "max_model_len": 128, "kv_blocks": 384}
    together = [x.token_ids for x in model.generate(prompts, options=options, **how)]
    apart = [x.token_ids for x in model.generate(prompts[::16], options={"max_seqs": 1, "max_model_len": 128}, **how)]
    assert together[::16] == apart
