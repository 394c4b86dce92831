"""The table of rules: each can be broken, names a value that holds, and the same sentence comes from run and check."""

import itertools
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from shapes import LLAMA_70B, TINY, llama

import afl
from afl import config as configs
from afl import plugins
from afl.config import EngineConfig
from afl.errors import ConfigError
from afl.run import preflight
from afl.run.ask import TABLE, Ask, Budget, Wish
from afl.run.load import asked, definition_of
from afl.run.rules import kv_heads, legal_tp, problems

plugins.load_models()
A3, P310, CPU = plugins.chip("a3"), plugins.chip("310p"), plugins.chip("cpu")


def wish(**options: Any) -> Any:
    return Wish(options)


def model(settings: dict[str, Any] = TINY, chip: Any = A3, dtype: str = "bfloat16", **more: Any) -> Ask:
    options = wish(chip=chip.name, dtype=dtype, **{k: more.pop(k) for k in list(more) if k in vars(wish())})
    return asked(settings, options, chip, **more)[1]


# rule -> (an ask that breaks it, how to put its nearest value in)
BROKEN: dict[str, tuple[Ask, Any]] = {
    **{f"range of {n}": (Ask(wish(**{n: high + 1})), lambda a, v, n=n: Ask(wish(**{n: v})))
       for n, (_, high) in configs.RANGES.items() if n not in ("threads", "max_step_tokens", "max_seqs")},
    "range of threads": (Ask(wish(threads=-1)), lambda a, v: Ask(wish(threads=v))),
    "range of max_seqs": (Ask(wish(max_seqs=0)), lambda a, v: Ask(wish(max_seqs=v))),
    "range of max_step_tokens": (Ask(wish(max_step_tokens=0, max_seqs=1)),
                                 lambda a, v: Ask(wish(max_step_tokens=v, max_seqs=1))),
    "a token for every request": (Ask(wish(max_seqs=9, max_step_tokens=5)),
                                  lambda a, v: Ask(wish(max_seqs=9, max_step_tokens=v))),
    "threads of this process": (Ask(wish(threads=configs.usable_cores() + 1)), lambda a, v: Ask(wish(threads=v))),
    "seed": (Ask(wish(seed=-3)), lambda a, v: Ask(wish(seed=v))),
    "policy": (Ask(wish(policy="fcsf")), None),
    "chip": (Ask(wish(chip="a33")), lambda a, v: Ask(wish(chip=v))),
    "dtype of the chip": (Ask(wish(dtype="float32"), A3), lambda a, v: Ask(wish(dtype=v), A3)),
    "weights of the chip": (model(weights="int4"), lambda a, v: model(weights=v)),
    "tokens of a block": (model(block_tokens=96), lambda a, v: model(block_tokens=v)),
    "positions of the model": (model(max_model_len=513), lambda a, v: model(max_model_len=v)),
    "architecture": (Ask(wish(), A3, settings={"architectures": ["LlamaForCausalML"]}),
                     lambda a, v: Ask(wish(), A3, settings={"architectures": [v]})),
    "mixture of experts": (Ask(wish(), A3, settings={"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64}),
                           None),
    "quantised checkpoint": (Ask(wish(), A3, settings=TINY | {"quantization_config": {"quant_method": "fp8"}}), None),
    **{f"size of {n}": (Ask(wish(), **{n: 0}), lambda a, v, n=n: Ask(wish(), **{n: v}))
       for n in ("tp", "pp", "dp", "ep")},
    "kernels of the chip": (Ask(wish(), unserved=("linear has none",)), None),
    "heads over tp": (model(tp=3), lambda a, v: model(tp=v)),
    "rows over tp": (model(llama(2, 64, 8, 8, 100), tp=8), lambda a, v: model(llama(2, 64, 8, 8, 100), tp=v)),
    **{f"{n} beyond 1": (Ask(wish(), **{n: 2}), lambda a, v, n=n: Ask(wish(), **{n: v})) for n in ("pp", "dp", "ep")},
    "ranks of experts": (Ask(wish(), tp=2, dp=2, ep=3), lambda a, v: Ask(wish(), tp=2, dp=2, ep=v)),
    "blocks in memory": (Ask(wish(kv_blocks=10), budget=Budget(100, block=10)),
                         lambda a, v: Ask(wish(kv_blocks=v), budget=Budget(100, block=10))),
}


def broken(ask: Ask) -> set[str]:
    return {v.rule for v in problems(ask)}


def test_every_rule_is_tried():
    assert set(BROKEN) == {r.name for r in TABLE} and len({r.name for r in TABLE}) == len(TABLE)


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_can_be_broken_and_its_nearest_values_hold(name: str):
    ask, put = BROKEN[name]
    (v,) = [v for v in problems(ask) if v.rule == name]
    assert v.text and v.expected and v.not_yet == v.text.startswith("not yet")
    if put is not None:
        assert v.nearest
        for value in v.nearest if name != "a token for every request" else v.nearest[:1]:
            assert name not in broken(put(ask, value)), (v, value)


def test_what_is_plain_breaks_nothing():
    for settings, chip, dtype in ((TINY, A3, "bfloat16"), (LLAMA_70B, P310, "float16"), (TINY, CPU, "float32")):
        assert problems(model(settings, chip, dtype)) == []


def test_everything_that_does_not_hold_comes_at_once():
    ask = model(tp=3, pp=2, block_tokens=7, max_model_len=9999, depth=9, weights="int8", seed=-1)
    want = {"heads over tp", "pp beyond 1", "tokens of a block", "positions of the model", "range of depth",
            "weights of the chip", "seed"}
    assert broken(ask) == want


@pytest.mark.parametrize("shape", [
    (8, 4, 96, 192), (9, 3, 1536, 49152), (6, 3, 96, 96), (12, 2, 60, 36), (4, 2, 8, 61),
])
def test_tensor_parallel_sizes_are_those_that_cut_everything_evenly(shape):
    """By trying to hand out heads and rows to ranks."""
    h, k, f, v = shape
    c = definition_of(TINY).config(llama(2, 64, h, k, f, v, head_dim=8))
    even = [tp for tp in range(1, h + 1) if h % tp == 0 and (tp == 1 or f % tp == 0 and v % tp == 0)
            and all(len({q * k // h for q in range(r * h // tp, (r + 1) * h // tp)} - set(kv_heads(k, tp, r))) == 0
                    for r in range(tp)) and len({len(kv_heads(k, tp, r)) for r in range(tp)}) == 1
            and (tp <= k or tp % k == 0) and (tp > k or k % tp == 0)]
    assert legal_tp(c) == even


@pytest.mark.parametrize(("k", "tp"), [(2, 4), (8, 32), (8, 2), (3, 3), (1, 8)])
def test_kv_heads_are_all_held_and_by_equally_many_ranks(k, tp):
    held = list(itertools.chain(*(kv_heads(k, tp, r) for r in range(tp))))
    assert {held.count(head) for head in range(k)} == {max(1, tp // k)}


# ---- I03 ------------------------------------------------------------------------------------------------------------


def test_i03_a_budget_counts_others_once_and_is_never_negative():
    gib = 1 << 30
    b = Budget(64 * gib, 0.3, others=20 * gib, own=5 * gib, block=gib)
    assert b.left == int(64 * gib * 0.3) - 5 * gib, "20 GiB of others lie outside of the 19.2 that may be used"
    assert Budget(64 * gib, 0.9, 20 * gib, 5 * gib, gib).left == (64 - 20 - 5) * gib, "others leave less than the share"
    short = Budget(64 * gib, 0.3, 20 * gib, 30 * gib, gib, "chip a3")
    assert short.left == 0 and short.blocks == 0
    (v,) = problems(Ask(wish(), budget=short))
    for figure in ("65536 MiB", "30%", "20480 MiB", "30720 MiB"):
        assert figure in str(v)


def test_i03_through_the_report():
    options = dict(fraction=0.3, others=20 << 30, max_seqs=4, max_step_tokens=16)
    small = preflight.check(preflight.Source(TINY, "bfloat16", "tiny"), "a3", **options)
    assert small.memory.usable_bytes == int((64 << 30) * 0.3) and small.supported
    big = preflight.check(preflight.Source(LLAMA_70B, "bfloat16", "70B"), "a3", **options)
    assert not big.supported and big.fit.blocks == 0 and big.memory.cache_bytes == 0
    (v,) = big.violations
    (tp,) = v.nearest
    assert preflight.check(preflight.Source(LLAMA_70B, "bfloat16", "70B"), "a3", tp=tp, **options).supported


# ---- run and check say the same -------------------------------------------------------------------------------------


ODD = TINY | {"head_dim": 8}         # which no attention of an NPU takes


@pytest.mark.parametrize("options", [
    {"dtype": "float32", "chip": "a3"}, {"block_tokens": 64, "chip": "a2"}, {"max_model_len": 513, "chip": "cpu"},
    {"weights": "int8", "chip": "a5"}, {"weights": "fp7", "chip": "cpu"}, {"policy": "fcsf", "chip": "310p"},
    {"chip": "a3"}, {"chip": "310p", "dtype": "float16"},
    {"max_model_len": 600, "block_tokens": 60, "weights": "int4", "chip": "310p"},
], ids=str)
def test_loading_refuses_with_the_words_of_the_check(options):
    report = preflight.check(preflight.Source(ODD, "bfloat16", "tiny"), **options)
    with pytest.raises(ConfigError) as e:
        afl.random_model("LlamaForCausalLM", ODD, **options).engine()
    assert report.violations and all(str(v) in str(e.value) for v in report.violations)


@pytest.mark.parametrize("more", [{"num_experts": 64}, {"quantization_config": {"quant_method": "awq"}}, {}])
def test_what_is_not_there_yet_is_refused_before_weights_are_looked_for(more, tmp_path: Path):
    settings = TINY | {"architectures": ["Qwen3MoeForCausalLM"]} | more
    (tmp_path / "config.json").write_text(json.dumps(settings))
    report = preflight.check(str(tmp_path), "a3")
    with pytest.raises(ConfigError) as e:
        afl.random_model("Qwen3MoeForCausalLM", settings)
    assert report.violations and all(str(v) in str(e.value) for v in report.violations)
    assert all(v.not_yet for v in report.violations) is bool(more) or "quantization_config" in more


def test_a_misspelt_key_of_the_config_names_the_nearest_and_others_are_left_alone():
    wrong = {**TINY, "num_key_value_head": 4, "rope_scalling": None, "unsloth_version": "1", "_name_or_path": "x"}
    wrong.pop("num_key_value_heads"), wrong.pop("rope_scaling")
    with pytest.raises(ConfigError) as e:
        preflight.check(preflight.Source(wrong, "", "x"), "a3")
    assert "'num_key_value_head'; did you mean 'num_key_value_heads'?" in str(e.value)
    assert "'rope_scalling'; did you mean 'rope_scaling'?" in str(e.value) and "unsloth" not in str(e.value)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="'max_seq'; did you mean 'max_seqs'"):
        preflight.check(preflight.Source(TINY, "", "x"), "a3", max_seq=3)


def test_options_of_an_engine_are_held_to_the_table_too():
    made = afl.random_model("LlamaForCausalLM", TINY | {"num_hidden_layers": 2})
    for options in ({"max_model_len": 513}, {"kv_blocks": 1 << 29}, {"policy": "x"}, {"block_tokens": -1}):
        with pytest.raises(ConfigError):
            made.engine(**options)
    assert attrs.asdict(EngineConfig()) == vars(Wish({}))
