"""`afl check`: forms, statuses, what may be named as a model, and the time and memory of the largest ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shapes import LLAMA_70B, LLAMA_405B, TINY

from afl import config as configs

ROOT = Path(__file__).parents[2]
SMALL = ("--max-seqs", 2, "--max-step-tokens", 4)


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """config(settings) -> the path of a config.json that stands alone."""
    made = {}

    def write(settings):
        key = json.dumps(settings)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("bare") / "config.json"
            made[key].write_text(key)
        return made[key]

    return write


def test_json_has_every_part_and_text_fits_a_screen(afl, config):
    given = ("check", "--model", config(TINY), "--chip", "a3", *SMALL)
    found = json.loads(afl(*given, "--json").stdout)
    assert found["supported"] and found["runs_today"] and found["violations"] == []
    assert set(found["memory"]) >= {"weight_bytes", "cache_bytes", "activation_bytes", "workspace_bytes",
                                    "communication_bytes"}
    assert found["fit"]["blocks"] > 0 and found["capture"]["limit"] == 1800 and found["host"]["vectors"] == 64
    assert [s["phase"] for s in found["steps"]] == ["decode", "prefill"] and found["kernels"] and found["programs"]
    text = afl(*given)
    assert text.exit_code == 0 and len(text.stdout.splitlines()) <= 45
    for word in ("supported", "weights", "fits", "decode step", "limited by", "host lengths", "capture", "kernels"):
        assert word in text.stdout


def test_statuses_are_zero_one_and_two(afl, config, tmp_path):
    bare = ("check", "--model", config(TINY), "--chip", "a3", *SMALL)
    assert afl(*bare).exit_code == 0
    wrong = afl(*bare, "--tp", 3, "--block-tokens", 64, "--pp", 2, "--depth", 9)
    assert wrong.exit_code == 1 and not wrong.stderr
    for words in ("nearest: 2 or 4", "block_tokens 64", "not yet: pp 2", "depth is 9"):
        assert words in wrong.stdout
    assert json.loads(afl(*bare, "--tp", 3, "--json").stdout)["violations"][0]["nearest"] == [2, 4]
    for options, words in (
        (("--chip", "a33"), "did you mean 'a3'"), (("--max-seq", 3), "--max-seqs"), (("--tp", 0), "--tp"),
        (("--model", tmp_path), "holds no weights"), (("--model", "/nowhere"), "neither a path"),
        (("--memory-fraction", 2), "at most 1"), (("--compare", "a2,b"), "unknown chip 'b'"),
    ):
        result = afl(*bare, *options)
        assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.stderr, options


@pytest.mark.parametrize("text", ["", "[]", "{", '{"architectures": 3}', '{"architectures": ["LlamaForCausalLM"]}',
                                  '{"architectures": ["LlamaForCausalLM"], "hidden_size": "x"}'])
def test_a_config_that_does_not_hold_is_bad_input(afl, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    result = afl("check", "--model", tmp_path / "config.json", "--chip", "a2")
    assert result.exit_code == 2 and result.stderr.startswith("afl: error: ") and not result.stdout


def test_experts_quantisation_and_foreign_architectures_are_answered(afl, config):
    for more, words in (({"num_experts": 64}, "not yet: this is a mixture of 64 experts"),
                        ({}, "unknown architecture 'Qwen3MoeForCausalLM'; did you mean 'Qwen3ForCausalLM'?"),
                        ({"quantization_config": {"quant_method": "fp8"}}, "not yet: quantised checkpoints")):
        result = afl("check", "--model", config(TINY | {"architectures": ["Qwen3MoeForCausalLM"]} | more))
        assert result.exit_code == 1 and words in result.stdout


def test_a_folder_with_and_without_weights_gives_the_same(afl, llama, config, monkeypatch):
    monkeypatch.setattr(configs, "available_memory", lambda *_: 1 << 34)
    given = ("check", "--chip", "cpu", "--kv-blocks", 20, *SMALL, "--json")
    whole = json.loads(afl(*given, "--model", llama).stdout)
    bare = json.loads(afl(*given, "--model", config(json.loads((Path(llama) / "config.json").read_text()))).stdout)
    alone = Path(llama) / "config.json"
    assert whole | {"model": ""} == bare | {"model": ""} and whole["fit"]["blocks"] == 20
    assert json.loads(afl(*given, "--model", alone).stdout)["memory"] == bare["memory"]


@pytest.mark.parametrize("options", [
    ("--max-model-len", 999, "--block-tokens", 60, "--weights", "int4"), ("--dtype", "float32", "--depth", 9), (),
], ids=str)
def test_run_refuses_with_the_message_of_the_check(afl, llama, options):
    found = json.loads(afl("check", "--model", llama, "--chip", "a2", "--json", *options).stdout)
    result = afl("run", "--model", llama, "--chip", "a2", "x", *options)
    assert result.exit_code == 2 and found["violations"] and not result.stdout
    assert all(v["text"] in result.stderr for v in found["violations"])


def test_chips_side_by_side(afl, config):
    given = ("check", "--model", config(TINY), *SMALL, "--compare", "a2,a3,a5,310p")
    table = afl(*given).stdout.splitlines()
    assert table[0].split() == ["a2", "a3", "a5", "310p"] and any(row.startswith("decode step") for row in table)
    assert [r["chip"] for r in json.loads(afl(*given, "--json").stdout)] == ["a2", "a3", "a5", "310p"]
    one = afl(*given, "--dtype", "bfloat16")
    assert one.exit_code == 1 and "310p: dtype 'bfloat16' is not one of chip '310p': auto, float16" in one.stdout


@pytest.mark.real
def test_the_default_model_is_known(afl):
    found = json.loads(afl("check", "--chip", "310p", "--json", *SMALL).stdout)
    assert found["parameters"] == 134_515_008 and found["dtype"] == "float16"


def test_the_page_on_rules_is_what_the_command_writes():
    code = "import sys; from afl_cli.commands import app; app(['check', '--markdown'])"
    env = os.environ | {"AFL_PLUGINS": "off"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "docs" / "rules.md").read_text(), "run `afl check --markdown > docs/rules.md`"


LARGE = [(name, chip) for name in ("405B", "70B") for chip in ("a2", "a3", "a5", "310p")]


@pytest.mark.parametrize(("name", "chip"), [
    pytest.param(*it, marks=[pytest.mark.soak] if it != ("405B", "a3") else []) for it in LARGE
])
def test_the_largest_models_take_less_than_twenty_seconds_and_two_gigabytes(config, name, chip):
    """Processor time and most memory of the whole command, with the options of the page on checking."""
    settings, tp = (LLAMA_405B, 64) if name == "405B" else (LLAMA_70B, 16)
    code = ("import resource, sys, afl_cli.main as m\n"
            "try: m.main()\nexcept SystemExit as e:\n"
            "    u = resource.getrusage(resource.RUSAGE_SELF)\n"
            "    print(e.code, u.ru_utime + u.ru_stime, u.ru_maxrss, file=sys.stderr)")
    run = [sys.executable, "-c", code, "check", "--model", str(config(settings)), "--chip", chip, "--tp", str(tp),
           "--max-model-len", "32768", "--max-seqs", "256", "--max-step-tokens", "8192", "--json"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    status, cpu, kib = done.stderr.split()
    found = json.loads(done.stdout)
    assert status == "0" and found["supported"] and found["programs"][0]["buckets"] > 100
    assert float(cpu) < 20 and int(kib) * 1024 < 2e9
