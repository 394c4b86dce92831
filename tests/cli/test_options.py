"""Options: what help teaches, what is refused before anything is loaded, and how fast."""

import os
import re
import subprocess
import sys

import attrs
import pytest
from afl_cli.early import engine_config
from afl_cli.prompts import from_lines

from afl.chip import DTYPE_ALIASES, Chip
from afl.config import EngineConfig
from afl.errors import ConfigError
from afl.run.load import choose_dtype
from afl.types import DTYPES

COMMANDS = [(), ("run",), ("inspect",), ("inspect", "graph"), ("inspect", "kernels"), ("inspect", "memory"),
            ("inspect", "model"), ("chips",), ("models",)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches_by_example(afl, command):
    result = afl(*command, "--help")
    assert result.exit_code == 0 and re.search(r"^ +afl .*\w", result.stdout.split("\n", 1)[1], re.M)


def test_help_of_run_names_every_option(afl):
    text = afl("run", "--help").stdout
    wanted = """--model --chip --max-tokens --temperature --top-p --top-k --min-p --seed --n --stop --stop-ids
        --logprobs --system --no-chat --dtype --ignore-eos --max-model-len --max-seqs --max-step-tokens --kv-blocks
        --block-tokens --eager --checked --depth --threads --json --stats --file --prompt-ids --min-tokens
        --log --policy""".split()
    missing = [o for o in wanted if not re.search(rf"{o}(?![\w-])", text)]
    assert not missing
    assert all(name in text for name in ("cpu", "fcfs", "priority", "smollm2")), "names come from listings"


def test_every_field_of_the_engines_config_is_an_option(afl):
    text = afl("run", "--help").stdout
    missing = [f.name for f in attrs.fields(EngineConfig) if f"--{f.name.replace('_', '-')}" not in text]
    assert not missing


def test_help_is_quick_and_needs_no_torch():
    code = ("import sys, resource, afl_cli.main as m\n"
            "try: m.main()\nexcept SystemExit: pass\n"
            "heavy = {'torch', 'numba', 'rich', 'numpy', 'transformers'} & set(sys.modules)\n"
            "u = resource.getrusage(resource.RUSAGE_SELF)\n"
            "print(sorted(heavy), u.ru_utime + u.ru_stime, file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    heavy, seconds = done.stderr.rsplit(None, 1)
    assert done.stdout and heavy == "[]"
    assert float(seconds) < 0.6, "processor time; the wall clock of a shared machine says little"


def test_a_misspelt_option_gets_the_nearest_name(afl):
    result = afl("run", "--temprature", "1", "x")
    assert result.exit_code == 2 and "--temperature" in result.stderr and not result.stdout


def test_a_misspelt_variable_is_named_with_the_nearest(afl, monkeypatch):
    monkeypatch.setenv("AFL_PLUGIN", "off")
    result = afl("chips")
    assert result.exit_code == 0 and "AFL_PLUGIN is not known; did you mean AFL_PLUGINS?" in result.stderr


def test_all_options_that_do_not_hold_come_in_one_message(afl):
    result = afl("run", "x", "--chip", "cpx", "--depth", 9, "--max-seqs", 0, "--policy", "fcsf", "--threads", 999)
    assert result.exit_code == 2 and not result.stdout
    for part in ("5 problems", "unknown chip 'cpx'; did you mean 'cpu'? Known:", "depth is 9", "max_seqs is 0",
                 "did you mean 'fcfs'?", "threads is 999"):
        assert part in result.stderr, part


def test_bad_options_are_refused_without_torch():
    code = ("import sys, afl_cli.main as m\n"
            "try: m.main()\nexcept SystemExit as e: print(e.code, 'torch' in sys.modules)")
    run = [sys.executable, "-c", code, "run", "x", "--chip", "a9", "--model", "/nowhere"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.stdout == "2 False\n" and "unknown chip 'a9'" in done.stderr and "Traceback" not in done.stderr


def test_a_dtype_that_the_chip_lacks_is_refused_early(afl):
    result = afl("run", "x", "--dtype", "float8", "--model", "/nowhere")
    assert result.exit_code == 2 and "dtype 'float8' is not one of chip 'cpu': auto, float32" in result.stderr


def test_short_dtype_names_mean_what_the_loader_takes_them_for():
    any_chip = Chip("any", dtypes=("float32", "float16", "bfloat16"))
    for short, name in DTYPE_ALIASES.items():
        assert choose_dtype(short, any_chip) is DTYPES[name]
        engine_config({"dtype": short})


def test_a_policy_may_be_json():
    assert engine_config({"policy": '{"order": "fcfs"}'}).policy.startswith("{")
    with pytest.raises(ConfigError, match="not JSON"):
        engine_config({"policy": "{"})


def test_no_prompt_and_a_terminal_teaches(afl):
    result = afl("run", input="")
    assert result.exit_code == 2 and 'afl run "What is the capital of France?"' in result.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (("",), "the prompt is empty"),
    (("--prompt-ids", ""), "the prompt is empty"),
    (("--prompt-ids", "1,x"), "whole numbers between commas"),
    (("x", "--prompt-ids", "1"), "PROMPT and --prompt-ids were given"),
    (("x", "--stop-ids", "a"), "--stop-ids takes whole numbers"),
    (("x", "--logit-bias", "5"), "ID:VALUE"),
    (("--file", "/nowhere/prompts"), "cannot read /nowhere/prompts"),
])
def test_prompts_and_lists_that_cannot_be_read(afl, arguments, said):
    result = afl("run", "--model", "/nowhere", *arguments)
    assert result.exit_code == 2 and said in result.stderr and not result.stdout


def test_prompt_files():
    text = from_lines("one\n\n two \n", "p.txt")
    assert [(a.where, a.value) for a in text] == [("p.txt:1", "one"), ("p.txt:3", " two ")]
    lines = ['{"prompt": "a"}', '{"prompt": [1, 2]}', '{"messages": [{"role": "user", "content": "b"}]}', "{", "3",
             '{"prompt": "a", "max_tokens": 3}', '{"prompt": 3}', '{"messages": []}', '{"messages": ["x"]}']
    found = from_lines("\n".join(lines), "p.jsonl")
    assert [a.error is None for a in found] == [True] * 3 + [False] * 6
    assert found[1].value == [1, 2] and "'max_tokens' is not known" in found[5].error
    assert from_lines(lines[0], "p.txt")[0].value == "a", "recognised without the suffix"


def test_models_and_chips_are_listed(afl):
    assert "LlamaForCausalLM" in afl("models").stdout and "smollm2" in afl("models", "--json").stdout
    assert "float32" in afl("chips", "cpu").stdout
    result = afl("chips", "cpx")
    assert result.exit_code == 2 and "did you mean 'cpu'" in result.stderr


def test_the_module_runs_as_a_program_and_sets_the_autoload_switch():
    code = "import os, afl_cli; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    bare = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare).stdout == "0\n"
    done = subprocess.run([sys.executable, "-m", "afl_cli", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and re.match(r"afl \d", done.stdout)
