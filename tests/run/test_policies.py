"""What a policy asks for reaches it, or is refused: nothing acts as first come, first served without a word."""

import json

import attrs
import pytest

from afl import plugins
from afl.errors import ConfigError
from afl.run.load import random_model
from afl.run.policies import SUPPLIED, figured, policy_of
from afl.run.sampling import SamplingParams
from afl.sched import Policy, policies
from afl.sched.policies import recompute

SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def model():
    return random_model("LlamaForCausalLM", SIZES, seed=3)


def order(engine):
    """Ids in the order in which they end."""
    done = []
    while engine.busy:
        done += [id for id, _, why in engine.step().outputs.rows() if why]
    engine.close()
    return done


def submitted(model, policy, *urgencies):
    engine = model.engine(policy=policy, max_seqs=1, depth=1)
    for i, urgency in enumerate(urgencies):
        engine.submit([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), str(i), **urgency)
    return order(engine)


def test_priorities_and_deadlines_reach_the_policy(model):
    wishes = [{"priority": p} for p in (2, 1, -3, 1)]
    assert submitted(model, "priority", *wishes) == ["2", "1", "3", "0"]
    assert submitted(model, "fcfs", *wishes) == ["0", "1", "2", "3"]
    wishes = [{}, {"deadline": 900.0}, {"deadline": 90.0}, {"deadline": 1e8}]
    assert submitted(model, "deadline", *wishes) == ["2", "1", "3", "0"]


def test_every_need_is_supplied_or_refused(model):
    for name in policies.names():
        needs = policies.load(name).needs
        if set(needs) <= SUPPLIED:
            assert policy_of(name).files()
        else:
            with pytest.raises(ConfigError, match=f"'{name}' compares data-parallel ranks.*leave it out"):
                model.engine(policy=name)


def test_recompute_reckons_with_the_chip_and_the_model(model, tmp_path):
    plugins.load_ops()
    on = attrs.evolve(model, chip=plugins.chip("a2"))
    found = dict(figured(Policy(action="recompute"), on, 4096, 16).params)
    assert found["chip_flops"] == pytest.approx(0.68 * 313e12) and found["memory_gbps"] == pytest.approx(928)
    assert found["link_gbps"] == pytest.approx(51.2) and found["params"] == model.parameters
    assert found["kv_bytes"] == 256 and found["descriptors"] == 4 and found["attention"] == 2 * 6 * 2 * 16
    assert set(found) < set(recompute.DEFAULTS)
    mine = Policy(action="recompute", params={"link_gbps": 3.0})
    assert dict(figured(mine, on, 4096, 16).params)["link_gbps"] == 3.0
    # host memory is device memory: blocks are better in the cache
    here = dict(figured(mine, model, 4096, 16).params)
    assert here["swap"] == "never" and here["params"] == model.parameters and "chip_flops" not in here
    always = Policy(action="recompute", params={"swap": "always"})
    assert dict(figured(always, model, 4096, 16).params)["swap"] == "always"
    measured = Policy(action="recompute", params={"link_gbps": 3.0, "chip_flops": 1e11, "memory_gbps": 20.0})
    assert "swap" not in dict(figured(measured, model, 4096, 16).params)
    assert figured(Policy(), on, 4096, 16) == Policy()
    engine = model.engine(policy="recompute", log=str(tmp_path / "log"))
    engine.close()
    header = json.loads((tmp_path / "log").read_text().splitlines()[0])
    assert header["policy"]["params"]["swap"] == "never" and header["config"]["host_blocks"] == 0


def test_i07_an_engine_that_is_not_stepped_is_not_healthy(model):
    engine = model.engine()
    assert engine.health().ok
    engine.submit([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), "r")
    engine.step()
    since = engine.watch.since
    assert engine.health(since + 59).ok
    assert str(engine.health(since + 61)).startswith("no progress for 61.0 s; the oldest request is r: the result of")
    order(engine)
    assert engine.health(since + 1e6).ok
