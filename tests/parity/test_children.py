"""A24: samples of one prompt are requests of their own: own seeds, ends and grammars, and the prompt computed once."""

import pytest

from afl import sched
from afl.run.load import random_model
from afl.run.sampling import SamplingParams
from afl.sched import Arrived, Grammar, Request, Sampled, SchedConfig

SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False,
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SEEDS = 11, 12, 13
NEW = 20


@pytest.fixture(scope="module")
def model():
    return random_model("LlamaForCausalLM", SIZES, seed=3)


def sampling(seed, **more):
    return {"temperature": 1.5, "seed": seed, "max_tokens": NEW, **more}


@pytest.fixture(scope="module")
def alone(model):
    plain = {"max_seqs": 1, "prefix_cache": False}
    return [list(model.generate([PROMPT], options=plain, **sampling(s))[0].token_ids) for s in SEEDS]


def drain(engine, tokens, ends, starts, stop=lambda: False):
    """Step until nothing is left or `stop` says so, filing tokens, ends, and where each request's first chunk began."""
    while engine.busy and not stop():
        out = engine.step().outputs
        if engine.flight:
            plan = engine.flight[-1].plan
            for id, start in zip(plan.ids, plan.start, strict=True):
                starts.setdefault(id, int(start))
        for id, token, end in out.rows():
            if token >= 0:
                tokens.setdefault(id, []).append(token)
            if end:
                ends[id] = end


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 3, 7])
def test_children_end_apart_and_share_the_prompt(model, alone, depth, at):
    assert len({tuple(a) for a in alone}) == len(SEEDS)
    stop = alone[1][2]  # the second child ends at its third token at the latest
    engine = model.engine(max_seqs=4, block_tokens=4, kv_blocks=40, max_model_len=40, depth=depth, prefix_cache=True)
    tokens, ends, starts = {}, {}, {}
    engine.submit(PROMPT, SamplingParams(**sampling(SEEDS[0])), "warm")
    drain(engine, tokens, ends, starts, lambda: "warm" in tokens)
    engine.abort("warm")
    children = [f"child {i}" for i in range(3)]
    for i, id in enumerate(children):
        engine.submit(PROMPT, SamplingParams(**sampling(SEEDS[i], stop_ids=(stop,) if i == 1 else ())), id)
    for _ in range(at):
        drain(engine, tokens, ends, starts, iter([False, True]).__next__)
    for id in (children[0], children[2]):
        engine.abort(id)
    drain(engine, tokens, ends, starts)

    early = alone[1][: alone[1].index(stop) + 1]
    assert tokens["child 1"] == early and ends["child 1"] == "stop"
    for i in (0, 2):
        got = tokens.get(children[i], [])
        assert got == alone[i][: len(got)] and ends[children[i]] == "abort"
    kept = (len(PROMPT) - 1) // 4 * 4
    assert {starts[id] for id in children if id in starts} == {kept} and starts["warm"] == 0
    assert engine.sched.pool.free == engine.pool.blocks and not engine.sched.tickets


def test_children_wait_for_grammars_of_their_own():
    policy, ran = sched.Policy(), []
    s = sched.init(SchedConfig(4, 16, 32, 24, 4, prefix_cache=True), policy)
    events = [Arrived(Request(f"c{i}", PROMPT, 2, grammar=True, needs_host=True)) for i in range(3)]
    for i in (2, 0, 1):
        s, plan, _ = sched.step(s, events, policy)
        assert plan is None, "a request ran without its grammar"
        events = [Grammar(f"c{i}", ok=True)]
        while events:
            s, plan, _ = sched.step(s, events, policy)
            ran += [list(plan.ids)] if plan else []
            events = [Sampled(plan.step, [7] * len(plan.ids))] if plan else []
    assert ran == [["c2"], ["c2"], ["c0"], ["c0"], ["c1"], ["c1"]]
    assert s.pool.free == 24 and not s.tickets
