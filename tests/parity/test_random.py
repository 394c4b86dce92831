"""Random requests under random engine options give the tokens that each request has alone, run in the plainest way.

Every request brings its own sampling parameters; requests arrive while others run, and some are aborted.
"""

import gc
import random
import resource

import attrs
import pytest

from afl.run.load import random_model
from afl.run.sampling import SamplingParams
from afl.sched import replay

SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False,
)
EOS = (7,)


@pytest.fixture(scope="module")
def model():
    return attrs.evolve(random_model("LlamaForCausalLM", SIZES, seed=3), eos_ids=EOS)


def options(rng: random.Random) -> dict:
    """Engine options that can serve a request of 40 tokens."""
    size, seqs = rng.choice([1, 3, 4, 16, 40]), rng.choice([1, 2, 3, 5, 8])
    tight = rng.random() < 0.5
    return {
        "depth": rng.choice([1, 2, 3]), "block_tokens": size, "max_seqs": seqs, "max_model_len": 41,
        "kv_blocks": -(-41 // size) + rng.choice([0, 1, 4]) if tight else 0,
        "max_step_tokens": seqs + rng.choice([0, 1, 3, 7, 60]), "prefix_cache": rng.random() < 0.5,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        **({} if (mode := rng.choice(["", "", "eager", "checked", "references"])) == "" else {mode: True}),
    }


def request(rng: random.Random) -> tuple[list[int], dict]:
    """A prompt, often with a common beginning, and sampling parameters."""
    common = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3][: rng.choice([0, 0, 5, 16])]
    prompt = common + [rng.randrange(61) for _ in range(rng.choice([1, 1, 2, 5, 12]))]
    p: dict = {"max_tokens": rng.choice([1, 2, 5, 12]), "seed": rng.randrange(1 << 64)}
    if rng.random() < 0.6:
        p |= {"temperature": rng.choice([0.3, 1.0, 4.0]), "top_k": rng.choice([0, 5, 60])}
        p |= {"top_p": rng.choice([1, 0.8]), "min_p": rng.choice([0, 0.05])}
    if rng.random() < 0.3:
        p |= {"repetition_penalty": 1.4, "frequency_penalty": rng.choice([0, 0.5]), "presence_penalty": -0.3}
    if rng.random() < 0.2:
        p |= {"bad_words_ids": ((5,), (9, 2), (9, 2, 6))}
    if rng.random() < 0.2:
        p |= {"logit_bias": {7: 4.0, 8: -2.0}}
    if rng.random() < 0.3:
        p |= {"min_tokens": 1, "stop_ids": (3, 17, 44)}
    return prompt, p | {"ignore_eos": rng.random() < 0.5}


def alone(model, prompt, params):
    (done,) = model.generate([prompt], options={"eager": True, "references": True, "depth": 1, "max_seqs": 1,
                                                "prefix_cache": False, "max_model_len": 41}, **params)
    return list(done.token_ids), done.finish_reason


def serve(model, rng, given, requests, log):
    """Tokens and finish reason of each request; about one in six is aborted on its way."""
    engine = model.engine(log=str(log), **given)
    waiting, tokens, finish, doomed = list(enumerate(requests)), {}, {}, set()
    while waiting or engine.busy:
        while waiting and rng.random() < 0.6:
            i, (prompt, params) = waiting.pop(0)
            engine.submit(prompt, SamplingParams(**params), str(i))
            tokens[str(i)] = []
            if rng.random() < 0.15:
                doomed.add(str(i))
        if doomed and rng.random() < 0.3:
            engine.abort(doomed.pop())
        for id, token, why in engine.step().outputs.rows():
            tokens[id] += [token] * (token >= 0)
            if why:
                finish[id] = why
    engine.close()
    assert not engine.live and engine.metrics()["blocks_used"] == 0
    assert replay(log).digest() == engine.sched.digest()
    return [(tokens[str(i)], finish[str(i)]) for i in range(len(requests))]


def compare(model, log, seed):
    rng = random.Random(seed)
    given, requests = options(rng), [request(rng) for _ in range(rng.choice([1, 4, 9]))]
    for (got, why), (prompt, params) in zip(serve(model, rng, given, requests, log), requests, strict=True):
        want, reason = alone(model, prompt, params)
        what = f"seed {seed}: {given}, {prompt}, {params}"
        if why == "abort":
            assert got == want[: len(got)], what
        else:
            assert (got, why) == (want, reason), what


@pytest.mark.parametrize("seed", range(25))
def test_tokens_do_not_depend_on_options_or_company(model, tmp_path, seed):
    compare(model, tmp_path / "log", seed)


@pytest.mark.soak
def test_tokens_do_not_depend_on_options_or_company_at_length(model, tmp_path):
    for seed in range(1000, 1300):
        compare(model, tmp_path / "log", seed)


def growth(model, first, then):
    """Bytes of resident memory that `then` hundreds of requests add after the `first` ones."""
    engine, rng = model.engine(max_seqs=16, block_tokens=4, kv_blocks=200, max_model_len=41), random.Random(0)
    resident = []
    for i in range(first + then):
        for _ in range(100):
            prompt, params = request(rng)
            engine.submit(prompt, SamplingParams(**params))
        while engine.busy:
            engine.step()
        if i in (first - 1, first + then - 1):
            gc.collect()
            with open("/proc/self/statm") as f:
                resident.append(int(f.read().split()[1]) * resource.getpagesize())
    assert not engine.live and engine.metrics()["blocks_used"] == 0
    return resident[1] - resident[0]


def test_requests_that_were_served_leave_nothing(model):
    assert growth(model, 2, 3) < 2 << 20


@pytest.mark.soak
def test_two_thousand_requests_leave_nothing(model):
    assert growth(model, 5, 20) < 2 << 20
