"""Bug log, part A and what belongs to it: admission, preemption, limits, late results.  Ids are those of the log."""

import json

import numpy as np
import pytest

from afl import config as configs
from afl.errors import RequestError
from afl.run.sampling import SamplingParams


def test_a05_a_prompt_beyond_the_pool_is_refused_with_numbers_and_others_run_on(model, serve):
    engine = model.engine(kv_blocks=10, block_tokens=4, max_model_len=100)
    want = model.generate([[1, 2, 3]], max_tokens=6)[0].token_ids
    got = serve(engine, {"small": ([1, 2, 3], {"max_tokens": 6}), "big": ([5] * 60, {"max_tokens": 5})})
    assert got["small"] == (list(want), "length")
    tokens, why = got["big"]
    assert tokens == [] and "60 tokens" in why and ("40" in why or "39" in why), why
    assert serve(engine, {"next": ([1, 2, 3], {"max_tokens": 6})})["next"][0] == list(want)


@pytest.mark.parametrize("depth", [1, 2])
def test_a08_a_resumed_request_prefills_prompt_and_outputs_before_it_samples(model, serve, depth):
    sizes = dict(kv_blocks=7, block_tokens=4, max_seqs=2, max_step_tokens=4, prefix_cache=False)
    engine, plans = model.engine(depth=depth, **sizes), []
    requests = {"old": ([5, 9, 2], {"max_tokens": 20}), "new": ([6, 1, 8], {"max_tokens": 20})}
    got = serve(engine, requests, plans)
    assert engine.sched.preemptions > 0
    for id, (prompt, sampling) in requests.items():
        assert got[id][0] == list(model.generate([prompt], **sampling)[0].token_ids), id
    mine = [(int(p.start[i]), int(p.grant[i]), bool(p.emit[i])) for p in plans for i in np.flatnonzero(p.ids == "new")]
    again = max(i for i, m in enumerate(mine) if m[0] == 0)
    assert again > 0
    known = mine[again - 1][0] + mine[again - 1][1]
    assert known > 4 and all(n <= 4 for _, n, _ in mine)
    ends = [start + n for start, n, emits in mine[again:] if emits]
    assert ends[0] > known, "sampled before all of the former context was computed"


def test_a10_running_and_tokens_stay_within_their_limits(model, serve):
    engine, plans = model.engine(kv_blocks=40, block_tokens=4, max_seqs=32, max_step_tokens=40, max_model_len=64), []
    got = serve(engine, {str(i): ([i % 61, i % 7], {"max_tokens": 4 + i % 9}) for i in range(100)}, plans)
    assert engine.sched.preemptions > 0
    assert max(len(p.rows) for p in plans) <= 32 and max(p.tokens for p in plans) <= 40
    assert all(len(tokens) == 4 + int(i) % 9 and why == "length" for i, (tokens, why) in got.items())


def test_a11_no_position_reaches_the_length_limit(model, serve):
    engine, plans = model.engine(max_model_len=16), []
    got = serve(engine, {str(n): ([7] * n, {}) for n in (14, 15, 16, 17)}, plans)
    assert [(len(got[n][0]), got[n][1]) for n in ("14", "15")] == [(2, "length"), (1, "length")]
    for n in ("16", "17"):
        assert got[n][0] == [] and "15" in got[n][1] and n in got[n][1]
    assert max(int(p.kv_len.max()) for p in plans) <= 15
    with pytest.raises(RequestError, match="16"):
        model.generate([[7] * 16], options={"max_model_len": 16})


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a13_a_result_that_comes_after_the_abort_is_dropped_and_counted(model, serve, depth):
    engine = model.engine(depth=depth, max_seqs=2)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=50), "gone")
    for _ in range(depth + 3):
        engine.step()
    engine.abort("gone")
    engine.abort("never seen")
    rows = []
    while engine.busy:
        rows += engine.step().outputs.rows()
    # with one step in flight the result and the abort arrive together
    assert rows.count(("gone", -1, "abort")) == 1 and engine.sched.dropped >= depth - 1
    want = list(model.generate([[4, 5]], max_tokens=7)[0].token_ids)
    assert serve(engine, {"next": ([4, 5], {"max_tokens": 7})})["next"] == (want, "length")


def test_b22_one_limit_for_admission_scheduler_pool_and_command_line(llama, model, settings, cli, monkeypatch, serve):
    """Memory for 150 tokens, a config that says 262,144."""
    import shutil

    import afl

    long = afl.random_model("LlamaForCausalLM", settings | {"max_position_embeddings": 262_144}, seed=3)
    block = sum(c.block_bytes(10, long.dtype) for c in long.caches)
    monkeypatch.setattr(configs, "available_memory", lambda *_: 16 * block * 4)  # a quarter: 15 blocks and the null
    engine = long.engine(block_tokens=10)
    assert engine.pool.max_model_len == engine.sched.config.max_model_len == engine.pool.tokens == 150
    got = serve(engine, {"fits": ([3] * 149, {}), "over": ([3] * 150, {}), "grows": ([3] * 100, {})})
    assert (len(got["fits"][0]), got["fits"][1]) == (1, "length") and len(got["grows"][0]) == 50
    assert got["over"][0] == [] and "149" in got["over"][1]

    copy = llama.parent / "long"
    if not copy.exists():
        shutil.copytree(llama, copy)
        config = json.loads((copy / "config.json").read_text()) | {"max_position_embeddings": 262_144}
        (copy / "config.json").write_text(json.dumps(config))
    given = ("--model", copy, "--block-tokens", 10)
    ids = [",".join(["3"] * n) for n in (149, 150)]
    shown = cli("run", *given, "--ignore-eos", "--stats", "--max-tokens", 0, "--prompt-ids", ids[0])
    assert shown.exit_code == 0 and "150 tokens (the model's 262144)" in shown.stderr
    refused = cli("run", *given, "--prompt-ids", ids[1])
    assert refused.exit_code == 2 and "150" in refused.stderr
    listed = json.loads(cli("inspect", "memory", *given, "--json").stdout)
    assert listed["max_model_len"] == 150


def test_f08_rows_of_one_step_that_bring_several_tokens_each_use_their_own_parameters(model, serve):
    requests = {
        "hot": ([5], {"temperature": 2.0, "seed": 1, "max_tokens": 8}),
        "greedy": ([6, 1, 8, 2], {"max_tokens": 8}),
        "cool": ([9, 3], {"temperature": 0.7, "seed": 2, "top_k": 5, "max_tokens": 8}),
    }
    plans = []
    got = serve(model.engine(max_seqs=3), requests, plans)
    assert list(plans[0].grant) == [1, 4, 2]
    for id, (prompt, sampling) in requests.items():
        alone = model.generate([prompt], options={"max_seqs": 1}, **sampling)[0]
        assert got[id] == (list(alone.token_ids), "length")
    hot = model.generate([requests["hot"][0]], temperature=0.7, seed=1, max_tokens=8)[0]
    assert got["hot"][0] != list(hot.token_ids), "the temperatures make no difference to this prompt"


def test_an_abort_for_a_reason_that_does_not_exist_is_refused_and_ends_nothing(model, serve):
    engine = model.engine()
    engine.submit([5, 9], SamplingParams(max_tokens=3), "a")
    with pytest.raises(RequestError, match="'bored'.*stop, length, abort"):
        engine.abort("a", "bored")
    assert serve(engine, {"b": ([5, 9], {"max_tokens": 3})})["b"][1] == "length"
