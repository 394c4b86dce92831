"""`afl inspect` needs headers only."""

import json

import pytest

from afl.models.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Reading a weight fails the test."""
    monkeypatch.setattr(Checkpoint, "read_into", None)
    monkeypatch.setattr(Checkpoint, "read", None)


def test_graph_in_every_form(afl, qwen3):
    text = afl("inspect", "graph", "--model", qwen3, "--rows", 3).stdout
    assert text.startswith("graph(") and "paged_attention" in text and "f32[3,32]" in text
    assert "f32[48,32]" in afl("inspect", "graph", "--model", qwen3, "--rows", 3, "--phase", "prefill").stdout
    dot = afl("inspect", "graph", "--model", qwen3, "--format", "dot", "--rewritten").stdout
    assert dot.startswith("digraph") and dot.rstrip().endswith("}")
    assert "<table" in afl("inspect", "graph", "--model", qwen3, "--format", "html").stdout


def test_program_is_python(afl, llama):
    source = afl("inspect", "graph", "--model", llama, "--program").stdout
    compile(source, "program", "exec")
    assert source.startswith("def decode(")
    refused = afl("inspect", "graph", "--model", llama, "--program", "--format", "dot")
    assert refused.exit_code == 2 and "--rewritten" in refused.stderr


def test_kernels_say_why(afl, llama):
    text = afl("inspect", "kernels", "--model", llama).stdout
    assert "paged_attention on cpu: chosen" in text and "acceptable, ordered after" in text
    one = json.loads(afl("inspect", "kernels", "--model", llama, "--op", "linear", "--json").stdout)
    assert {c["op"] for c in one} == {"linear"} and all(c["chosen"] for c in one)
    unknown = afl("inspect", "kernels", "--model", llama, "--op", "linera")
    assert unknown.exit_code == 2 and "did you mean 'linear'?" in unknown.stderr


def test_memory_adds_up_and_names_the_limit_that_holds(afl, llama):
    options = ("--model", llama, "--kv-blocks", 9, "--block-tokens", 4)
    found = json.loads(afl("inspect", "memory", "--json", *options).stdout)
    assert found["block_bytes"] == 4 * 2 * 2 * 8 * 2 * 4       # tokens, k and v, heads, channels, layers, bytes
    assert found["max_model_len"] == 36 and found["model_max_len"] == 256
    assert "36 tokens (the model's 256)" in afl("inspect", "memory", *options).stdout


def test_model_shows_stop_ids_and_tensors(afl, llama):
    found = json.loads(afl("inspect", "model", "--model", llama, "--json", "--tensors").stdout)
    assert found["architecture"] == "LlamaForCausalLM" and found["layers"] == 2 and len(found["eos_ids"]) == 1
    assert found["tensor_list"]["model.norm.weight"]["fills"] == "norm"
    assert "eos_ids" in afl("inspect", "model", "--model", llama).stdout
