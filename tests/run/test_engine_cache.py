"""The engine with a prefix cache, swapping, pauses and other policies: the same tokens, and what the figures say."""

import pytest

from afl.run.generate import stream
from afl.run.load import random_model
from afl.run.sampling import SamplingParams
from afl.sched import replay

SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=256, tie_word_embeddings=False,
)
PROMPTS = [[(7 * i + k) % 61 for k in range(9)] + [i] for i in range(5)]
TIGHT = dict(max_seqs=5, kv_blocks=9, block_tokens=4, max_model_len=32)


@pytest.fixture(scope="module")
def model():
    return random_model("LlamaForCausalLM", SIZES, seed=3)


def serve(engine, prompts=PROMPTS, n=9, **sampling):
    done = [p.done for p in stream(engine, prompts, SamplingParams(max_tokens=n, **sampling)) if p.done]
    assert all(d.error is None for d in done), done
    return {d.index: d.token_ids for d in done}, {d.index: d.stats["cached_tokens"] for d in done}


@pytest.fixture(scope="module")
def alone(model):
    return serve(model.engine(max_seqs=1, eager=True, prefix_cache=False))[0]


@pytest.mark.parametrize("eager", [False, True])
def test_a_prompt_sent_again_is_found_and_gives_the_same_tokens(model, alone, eager):
    engine = model.engine(max_seqs=5, block_tokens=4, max_model_len=32, eager=eager)
    first, cold = serve(engine)
    again, warm = serve(engine)
    assert first == again == alone and set(cold.values()) == {0} and set(warm.values()) == {8}
    m = engine.metrics()
    assert m["prefix_hit_tokens"] == 40 and m["prefix_queried_tokens"] == 100 and m["blocks_used"] == 0
    engine.reset_prefix_cache()                                            # A22
    third, cold = serve(engine)
    assert third == alone and set(cold.values()) == {0}


def test_without_a_prefix_cache_nothing_is_found(model, alone):
    engine = model.engine(max_seqs=5, block_tokens=4, prefix_cache=False)
    assert serve(engine)[0] == serve(engine)[0] == alone and engine.metrics()["prefix_queried_tokens"] == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_swapping_to_the_host_changes_no_token(model, alone, depth, cache, eager):
    policy = '{"action": "recompute", "params": {"swap": "always"}}'
    engine = model.engine(policy=policy, depth=depth, prefix_cache=cache, eager=eager, **TIGHT)
    assert serve(engine)[0] == alone
    m = engine.metrics()
    assert m["swaps"] > 0 and m["recomputed_tokens"] == 0


@pytest.mark.parametrize("policy", ["priority", "shortest", "decode_first+watermark", "prefill_first", "growth",
                                    "deadline", "profiling", "recompute"])
def test_no_policy_changes_a_token(model, alone, policy):
    assert serve(model.engine(policy=policy, **TIGHT))[0] == alone


def test_a_pause_holds_everything_and_the_log_replays_to_the_engines_state(model, alone, tmp_path):
    engine = model.engine(log=str(tmp_path / "run.log"), **TIGHT)
    ids = [engine.submit(p, SamplingParams(max_tokens=9)) for p in PROMPTS]
    engine.step()
    engine.pause("keep")
    got = {id: [] for id in ids}
    for n in range(200):
        out = engine.step().outputs
        for id, token, _ in out.rows():
            got[id] += [token] * (token >= 0)
        if n == 10:
            assert not engine.flight and engine.sched.pause == "keep"
            engine.resume()
        if not engine.busy:
            break
    assert {i: tuple(got[id]) for i, id in enumerate(ids)} == alone
    engine.close()
    assert replay(tmp_path / "run.log").digest() == engine.sched.digest()
