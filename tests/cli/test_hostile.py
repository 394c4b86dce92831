"""Damaged checkpoints through the whole command: an answer, or one message and status 2; nothing else, and soon."""

import copy
import json
import random
import resource
import shutil
import time
from pathlib import Path

import gguf
import pytest
import tiny
from safetensors.torch import load_file

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors",
         "m.gguf")
JUNK = [
    None, True, False, 0, -1, 1, 2, 3, 7, 1 << 31, 1 << 40, 1 << 63, -(1 << 70), 10**400, 1e308, float("nan"),
    float("inf"), -0.5, 0.1, 1e-30, "", "x", "silu", "a" * 10_000, "\ud800", "\x1b[2J", [], [[]], {}, {"a": 1},
    [1] * 100_000, "LlamaForCausalLM", ["Qwen3ForCausalLM"], {"type": "yarn"}, {"rope_type": ["llama3"]},
    {"rope_type": "llama3", "factor": 1e300}, {"rope_type": "yarn", "factor": 1e-300}, [-1], "1",
]
KEYS = ["auto_map", "quantization_config", "rope_scaling", "rope_parameters", "partial_rotary_factor", "head_dim",
        "eos_token_id", "chat_template", "attention_bias", "temperature", "top_k", "do_sample", "max_new_tokens", "x"]
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.o_proj": "attn_output",
         **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}}


def places(x, at=()):
    """Paths to every value, of long lists to a few."""
    inner = list(x.items()) if isinstance(x, dict) else list(enumerate(x)) if isinstance(x, list) else []
    for k, v in inner[:: max(1, len(inner) // 9)] if isinstance(x, list) else inner:
        yield (*at, k)
        yield from places(v, (*at, k))


def damaged(x, rng):
    """A copy of a JSON value in which a few values are gone, scaled or something else."""
    x = copy.deepcopy(x)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        *way, last = rng.choice(list(places(x)) or [("x",)])
        at = x
        for k in way:
            at = at[k]
        old, kind = at.get(last) if isinstance(at, dict) else at[last], rng.random()
        if kind < 0.2:
            del at[last]
        elif kind < 0.4:
            x[rng.choice(KEYS)] = copy.deepcopy(rng.choice(JUNK))
        elif kind < 0.55 and type(old) in (int, float):
            at[last] = old * rng.choice([-1, 2, 3, 0.5, 1 << 20]) + rng.choice([0, 1, -1])
        else:
            at[last] = copy.deepcopy(rng.choice(JUNK))
    return x


def broken(raw, head, rng):
    """Bytes of which some of the first `head` are others, or missing, or too many."""
    raw, at, kind = bytearray(raw), rng.randrange(head), rng.random()
    if kind < 0.1:
        del raw[rng.randrange(len(raw)) :]
    elif kind < 0.2:
        del raw[at : at + rng.randrange(1, 40)]
    elif kind < 0.3:
        raw[at:at] = rng.randbytes(rng.randrange(1, 40))
    else:
        for _ in range(rng.choice([1, 1, 2, 5, 30])):
            at, new = rng.randrange(head), [b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little"), rng.randbytes(1)]
            new = rng.choice(new)
            raw[at : at + len(new)] = new
    return bytes(raw)


def damage(folder, name, rng):
    """Damage one file of a checkpoint."""
    file = folder / name
    if name == "m.gguf":
        file.write_bytes(broken(file.read_bytes(), 5000, rng))
    elif name.endswith(".json"):
        content = json.loads(file.read_text()) if file.exists() else {}
        text = json.dumps(damaged(content, rng)) if rng.random() < 0.8 else None
        file.write_bytes(broken(json.dumps(content).encode(), 2, rng) if text is None else text.encode())
    else:
        raw = file.read_bytes()
        n = int.from_bytes(raw[:8], "little")
        header = json.dumps(damaged(json.loads(raw[8 : 8 + n]), rng)).encode()
        whole = len(header).to_bytes(8, "little") + header + raw[8 + n :]
        file.write_bytes(whole if rng.random() < 0.5 else broken(raw, 8 + n, rng))


@pytest.fixture(scope="module")
def good(tmp_path_factory, llama):
    """A folder, and the same model as a GGUF file."""
    into = tmp_path_factory.mktemp("gguf") / "m.gguf"
    w, bpe = gguf.GGUFWriter(into, "llama"), json.loads(Path(llama, "tokenizer.json").read_text())
    for key, value in {"block_count": 2, "context_length": 256, "embedding_length": 32, "feed_forward_length": 48,
                       "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8}.items():
        w.add_uint32(f"llama.{key}", value)
    w.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    vocab = {**bpe["model"]["vocab"], **{t["content"]: t["id"] for t in bpe["added_tokens"]}}
    tokens = sorted(vocab, key=lambda t: vocab[t])
    special = {t["id"] for t in bpe["added_tokens"]}
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_string("tokenizer.ggml.pre", "gpt-2")
    w.add_array("tokenizer.ggml.token_type", [3 if i in special else 1 for i in range(len(tokens))])
    w.add_uint32("tokenizer.ggml.eos_token_id", vocab["<|end|>"])
    w.add_string("tokenizer.chat_template", tiny.TEMPLATE)
    w.add_array("tokenizer.ggml.tokens", tokens)
    w.add_array("tokenizer.ggml.merges", [m if isinstance(m, str) else " ".join(m) for m in bpe["model"]["merges"]])
    for name, x in load_file(Path(llama, "model.safetensors")).items():
        base = name.removesuffix(".weight")
        layer, _, rest = base.removeprefix("model.layers.").partition(".")
        w.add_tensor((f"blk.{layer}.{NAMES[rest]}" if rest in NAMES else NAMES[base]) + ".weight", x.numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return Path(llama), into


def survive(afl, good, into, name, seed):
    """Run a damaged copy; its exit status."""
    shutil.rmtree(into, ignore_errors=True)
    if name == "m.gguf":
        into.mkdir()
        shutil.copy(good[1], into)
    else:
        shutil.copytree(good[0], into)
    damage(into, name, random.Random(seed))
    start = time.process_time()
    result = afl("run", "--model", into, "hi the", "--max-tokens", 2, "--max-seqs", 2)
    what = f"{name}, seed {seed}: {result.stderr[-700:]}"
    assert result.exit_code in (0, 2), what
    assert result.exit_code == 0 or result.stderr.startswith("afl: error: ") and len(result.stderr) < 6000, what
    assert time.process_time() - start < 30, what
    return result.exit_code


def many(afl, good, tmp_path, name, seeds):
    status = [survive(afl, good, tmp_path / "m", name, s) for s in seeds]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20, "more than 2 GiB"
    return status


def test_both_forms_run_undamaged(afl, good):
    for it in good:
        assert afl("run", "--model", it, "hi the", "--max-tokens", 2).exit_code == 0


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_an_answer_or_one_message(afl, good, tmp_path, name):
    assert 2 in many(afl, good, tmp_path, name, range(15))


@pytest.mark.soak
@pytest.mark.parametrize("name", FILES)
def test_many_damaged_files(afl, good, tmp_path, name):
    many(afl, good, tmp_path, name, range(100, 440))
