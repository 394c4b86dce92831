"""GGUF files written by the format's own package, against transformers and against hostile headers."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf.constants import GGML_QUANT_SIZES

from afl.errors import CheckpointError
from afl.models import gguf_text, tensors
from afl.models.checkpoint import open_checkpoint
from afl.models.gguf import dequantise, read_file

Q = gguf.GGMLQuantizationType
SIZES = {"block_count": 2, "context_length": 128, "embedding_length": 96, "feed_forward_length": 160}
HEADS, KV_HEADS, E = 3, 1, 32
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "Ġt", "he", "Ġthe", "12", "<|end|>", "<|user|>", "<think>"]
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]


def writer(path: Path, arch: str = "llama", **text) -> gguf.GGUFWriter:
    """A writer with the metadata of a tiny model; `text` replaces tokenizer entries (None leaves one out)."""
    w = gguf.GGUFWriter(path, arch)
    for key, value in SIZES.items():
        w.add_uint32(f"{arch}.{key}", value)
    w.add_uint32(f"{arch}.attention.head_count", HEADS)
    w.add_uint32(f"{arch}.attention.head_count_kv", KV_HEADS)
    w.add_uint32(f"{arch}.attention.key_length", E)
    w.add_uint32(f"{arch}.attention.value_length", E)
    w.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    w.add_float32(f"{arch}.rope.freq_base", 10000.0)
    entries = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "token_type": TYPES, "merges": MERGES,
               "eos_token_id": len(TOKENS) - 3, "bos_token_id": 0} | text
    for key, value in entries.items():
        add = {str: w.add_string, int: w.add_uint32, list: w.add_array, bool: w.add_bool}.get(type(value))
        if add is not None:
            add(f"tokenizer.ggml.{key}", value)
    return w


def close(w: gguf.GGUFWriter) -> None:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_small(path: Path, arch: str = "llama", extra=(), **text) -> Path:
    """A file with one F32 and one Q8_0 tensor; `extra` is a function of the writer."""
    w = writer(path, arch, **text)
    rng = np.random.default_rng(0)
    w.add_tensor("output_norm.weight", rng.standard_normal(64, np.float32))
    w.add_tensor("token_embd.weight", gguf.quants.quantize(rng.standard_normal((7, 64), np.float32), Q.Q8_0),
                 raw_dtype=Q.Q8_0)
    for add in extra:
        add(w)
    close(w)
    return path


def interleave(w: torch.Tensor) -> torch.Tensor:
    """What writers of the `llama` architecture do to q and k: half-split rows become pairs."""
    return w.reshape(-1, 2, E // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.o_proj": "attn_output",
         **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
         **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"}}


def write_model(path: Path, arch: str, weights: dict[str, torch.Tensor]) -> None:
    w = writer(path, arch, pre="qwen2" if arch == "qwen3" else "llama-bpe")
    for name, x in weights.items():
        base = name.removesuffix(".weight")
        layer, _, rest = base.removeprefix("model.layers.").partition(".")
        to = f"blk.{layer}.{NAMES[rest]}" if rest in NAMES else NAMES[base]
        permuted = arch == "llama" and to.endswith(("attn_q", "attn_k"))
        w.add_tensor(to + ".weight", (interleave(x) if permuted else x).numpy())
    close(w)


@pytest.mark.parametrize("arch, tied", [("llama", False), ("llama", True), ("qwen3", False), ("qwen3", True)])
def test_a_converted_model_gives_the_weights_and_logits_of_the_original(tmp_path, arch, tied):
    """The oracle is transformers: the original model, and its own reader of GGUF."""
    import transformers as hf
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=len(TOKENS), hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=E, max_position_embeddings=128, rms_norm_eps=1e-5,
        tie_word_embeddings=tied, rope_theta=10000.0,
    )
    config, model = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM), "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM)
    }[arch]
    original = model(config(**sizes)).eval()
    with torch.no_grad():
        for p in original.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    weights = {k: v for k, v in original.state_dict().items() if not (tied and k == "lm_head.weight")}
    write_model(tmp_path / "m.gguf", arch, weights)

    c = open_checkpoint(tmp_path / "m.gguf")
    assert set(c.tensors) == set(weights)
    for name, x in weights.items():
        assert torch.equal(c.read(name), x), name
    for key, value in sizes.items():
        assert c.config[key] == value, key
    assert c.config["architectures"] == [type(original).__name__]
    again = model(config(**{k: v for k, v in c.config.items() if k != "architectures"})).eval()
    again.load_state_dict({k: c.read(k) for k in c.tensors}, strict=not tied)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        want, got = original(ids).logits, again(ids).logits
        assert torch.equal(want, got)
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=original)
    for name, x in theirs["tensors"].items():
        assert torch.equal(x, weights[name]), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"])
def test_block_formats_come_back_within_their_step(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tensors, "CHUNK_ELEMENTS", 200)
    x = np.random.default_rng(1).standard_normal((13, 64), np.float32)
    stored = gguf.quants.quantize(x, Q[kind])

    def add(w: gguf.GGUFWriter) -> None:
        w.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=Q[kind])

    path = write_small(tmp_path / "m.gguf", extra=[add])
    got = open_checkpoint(path).read("model.layers.0.mlp.up_proj.weight").float()
    # a block spans at most about 6 sigma; its step is that over the number of levels
    step = {"Q8_0": 6 / 255, "Q4_0": 6 / 15, "Q4_1": 6 / 15, "Q5_0": 6 / 31, "Q5_1": 6 / 31}.get(kind, 0.02)
    assert np.abs(got.numpy() - x).max() < step
    assert torch.equal(got, torch.from_numpy(gguf.quants.dequantize(stored, Q[kind]).reshape(x.shape)))


def q4_1(b: bytes) -> list[float]:
    d, m = np.frombuffer(b[:4], np.float16).astype(np.float64)
    q = b[4:]
    return [d * (v & 15) + m for v in q] + [d * (v >> 4) + m for v in q]


def q4_k(b: bytes) -> list[float]:
    d, low = np.frombuffer(b[:4], np.float16).astype(np.float64)
    s, q, out = b[4:16], b[16:], []
    for j in range(8):
        if j < 4:
            scale, offset = s[j] & 63, s[j + 4] & 63
        else:
            scale, offset = s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4
        part = q[j // 2 * 32 : j // 2 * 32 + 32]
        out += [d * scale * (v >> 4 if j % 2 else v & 15) - low * offset for v in part]
    return out


def q6_k(b: bytes) -> list[float]:
    low, high, scales = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8).astype(int)
    d, out = float(np.frombuffer(b[208:], np.float16)[0]), []
    for i in range(256):
        half, j, k = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * half + 32 * (j % 2) + k] >> (4 if j > 1 else 0) & 15
        q = (nibble | (high[32 * half + k] >> 2 * j & 3) << 4) - 32
        out.append(d * scales[i // 16] * q)
    return out


@pytest.mark.parametrize("kind, formula", [("Q4_1", q4_1), ("Q4_K", q4_k), ("Q6_K", q6_k)])
def test_dequantisation_agrees_with_the_formats_definition(kind, formula):
    size = GGML_QUANT_SIZES[Q[kind]][1]
    raw = np.random.default_rng(2).integers(0, 256, (3, 2 * size), np.uint8)
    scales = {"Q6_K": [208]}.get(kind, [0, 2])
    for row in raw:
        for at in (0, size):
            for s in scales:
                row[at + s : at + s + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    want = [formula(bytes(row[at : at + size])) for row in raw for at in (0, size)]
    np.testing.assert_allclose(dequantise(raw, kind).numpy(), np.concatenate(want), rtol=1e-5, atol=1e-6)


def test_rope_factors_are_consumed_into_the_config(tmp_path):
    factors = np.linspace(1, 8, E // 2, dtype=np.float32)
    path = write_small(tmp_path / "m.gguf", extra=[lambda w: w.add_tensor("rope_freqs.weight", factors)])
    c = open_checkpoint(path)
    assert c.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert set(c.tensors) == {"model.embed_tokens.weight", "model.norm.weight"}
    assert c.config["tie_word_embeddings"] is True


@pytest.mark.parametrize("change, message", [
    (lambda w: w.add_uint32("llama.mystery", 3), "llama.mystery are not understood"),
    (lambda w: w.add_uint32("llama.expert_count", 8), "mixture of experts"),
    (lambda w: w.add_uint32("llama.rope.dimension_count", 16), "rope.dimension_count is 16"),
    (lambda w: w.add_array("llama.rope.scale_linear", [1, 2]), "differ by layer"),
    (lambda w: w.add_uint32("split.count", 3), "split files"),
    (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)), "rope_freqs.weight has shape"),
    (lambda w: w.add_tensor("rope_freqs.weight", np.zeros(16, np.float32)), "positive and finite"),
    (lambda w: w.add_tensor("blk.0.attn_q.weight", np.ones((33, 64), np.float32)), "not heads of 32"),
    (lambda w: w.add_tensor("blk.0.ffn_up.weight", np.ones((3, 34), np.uint8), raw_dtype=Q.IQ4_NL), "IQ4_NL"),
])
def test_metadata_that_could_change_results_is_refused(tmp_path, change, message):
    if "IQ4_NL" in message:
        change = lambda w: w.add_tensor("blk.0.ffn_up.weight", np.ones((3, 18), np.uint8), raw_dtype=Q.IQ4_NL)  # noqa: E731
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_small(tmp_path / "m.gguf", extra=[change]))


def test_an_unknown_architecture_is_refused_with_the_list(tmp_path):
    with pytest.raises(CheckpointError, match="unknown GGUF architecture 'gemma3'.*llama, qwen3"):
        open_checkpoint(write_small(tmp_path / "m.gguf", "gemma3"))


@pytest.mark.parametrize("text, message", [
    ({"model": "llama"}, "unknown tokenizer.ggml.model 'llama'.*gpt2"),
    ({"model": None}, "unknown tokenizer.ggml.model"),
    ({"pre": "default"}, "unknown tokenizer.ggml.pre 'default'.*smollm"),
    ({"pre": None}, "unknown tokenizer.ggml.pre"),
    ({"tokens": TOKENS[:-1]}, "type 1..6 for each"),
    ({"token_type": [9] * len(TOKENS)}, "type 1..6 for each"),
    ({"tokens": [*TOKENS[:-1], TOKENS[0]]}, "duplicates"),
    ({"merges": ["q zz"]}, "does not join"),
    ({"bos_token_id": 99999, "add_bos_token": True}, "99999, which is no token"),
    ({"bos_token_id": None, "add_bos_token": True}, "no bos_token_id"),
])
def test_an_unknown_tokenizer_is_an_error_and_never_a_default(tmp_path, text, message):
    with pytest.raises(CheckpointError, match=message):
        gguf_text.tokenizer_json(read_file(write_small(tmp_path / "m.gguf", **text)))
        open_checkpoint(tmp_path / "m.gguf")


TEXTS = [
    "Hello the world's 1234567 don't WE'LL I'M", "  two  spaces\n\n\tand tabs \r\n end  ",
    "naïve café Ωmega 你好，世界", "x=[1,2,3]; // !!!???\n\n\n", "٣٤٥ ½ Ⅷ ²", "e\u0301 o\u0308", "🤖🤖 the\u00a0end",
    "", " ", "<|end|>the<|user|> <think>12",
]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm"])
def test_pre_tokenisers_split_like_those_of_transformers(tmp_path, pre):
    from transformers import GPT2Tokenizer, Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    made = tokenizers.Tokenizer.from_str(gguf_text.tokenizer_json(read_file(write_small(tmp_path / "m.gguf", pre=pre))))
    vocab, merges = {t: i for i, t in enumerate(TOKENS)}, [tuple(m.split()) for m in MERGES]
    if pre == "qwen2":
        theirs = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
        assert str(theirs.normalizer) == str(made.normalizer)
        split = theirs.pre_tokenizer
    elif pre == "gpt-2":
        split = GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer.pre_tokenizer
    elif pre == "llama-bpe":
        p = tokenizers.pre_tokenizers
        pattern = tokenizers.Regex(TikTokenConverter().pattern)
        split = p.Sequence([p.Split(pattern, "isolated"), p.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:   # SmolLM2's tokenizer.json: digits one by one, then GPT-2
        p = tokenizers.pre_tokenizers
        split = p.Sequence([p.Digits(individual_digits=True), p.ByteLevel(add_prefix_space=False)])
    for text in TEXTS:
        assert made.pre_tokenizer.pre_tokenize_str(text) == split.pre_tokenize_str(text), text
        assert made.decode(made.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == (
            made.normalizer.normalize_str(text) if made.normalizer else text
        )


def test_special_tokens_are_marked_and_begin_tokens_added_when_asked(tmp_path):
    def ids(**text):
        t = tokenizers.Tokenizer.from_str(gguf_text.tokenizer_json(read_file(write_small(tmp_path / "m.gguf", **text))))
        return t, t.encode("the<|end|>").ids

    n = len(TOKENS)
    t, plain = ids()
    assert plain[-1] == n - 3 and t.decode([n - 3, n - 1]) == "<think>"
    assert ids(add_bos_token=True, bos_token_id=n - 2)[1] == [n - 2, *plain]
    assert ids(add_eos_token=True, eos_token_id=n - 2)[1] == [*plain, n - 2]
    assert ids(pre="llama-bpe", bos_token_id=n - 2)[1] == [n - 2, *plain]
    assert ids(pre="llama-bpe", bos_token_id=n - 2, add_bos_token=False)[1] == plain
    c = open_checkpoint(write_small(tmp_path / "m.gguf", eot_token_id=n - 2))
    assert c.eos_ids == (n - 3, n - 2) and c.special_tokens["eos_token"] == "<|end|>"


def header(tensors: int = 0, keys: int = 0, body: bytes = b"", magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + body


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def blob(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize("raw, message", [
    (b"", "truncated"), (b"GGUF", "truncated"), (header(magic=b"GGML"), "not a GGUF file"),
    (header(version=1), "version 1"), (header(version=3 << 24), "big-endian"),
    (header(tensors=1 << 60), "claims"), (header(keys=1 << 40), "claims"), (header(keys=1), "truncated"),
    (header(keys=1, body=struct.pack("<Q", 1 << 62)), "a string of"),
    (header(keys=1, body=entry("a", 8, struct.pack("<Q", 1 << 23))), "truncated"),
    (header(keys=1, body=entry("a", 77, b"")), "unknown type 77"),
    (header(keys=1, body=entry("a", 9, struct.pack("<IQ", 4, 1 << 60))), "truncated"),
    (header(keys=1, body=entry("a", 9, struct.pack("<IQ", 8, 1 << 60))), "claims"),
    (header(keys=1, body=entry("a", 9, struct.pack("<IQ", 9, 1))), "array of the type 9"),
    (header(keys=1, body=entry("a", 8, struct.pack("<Q", 2) + b"\xff\xff")), "not UTF-8"),
    (header(keys=2, body=entry("a", 7, b"\1") * 2), "twice"),
    (header(keys=1, body=entry("general.alignment", 4, struct.pack("<I", 0))), "power of two"),
    (header(keys=1, body=entry("general.alignment", 8, struct.pack("<Q", 0))), "power of two"),
    (header(tensors=1, body=struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 30)), "dimensions"),
    (header(tensors=1, body=blob("t", [1 << 40, 1 << 40], 0, 0)), "impossible shape"),
    (header(tensors=1, body=blob("t", [1 << 20], 0, 0)), "truncated: tensor 't'"),
    (header(tensors=1, body=blob("t", [4], 0, 1 << 63)), "truncated: tensor 't'"),
    (header(tensors=1, body=blob("t", [4], 0, 5)), "not aligned"),
    (header(tensors=1, body=blob("t", [33, 2], 8, 0)), "whole Q8_0 blocks"),
    (header(tensors=1, body=blob("t", [0, 2], 0, 0)), "whole F32 blocks"),
    (header(tensors=1, body=blob("t", [4], 999, 0)), "stored as 999"),
    (header(tensors=2, body=blob("t", [4], 0, 0) + blob("u", [4], 0, 0)) + b"\0" * 99, "overlaps"),
    (header(tensors=2, body=blob("t", [4], 0, 0) * 2) + b"\0" * 99, "occurs twice"),
    (header() + b"\0" * 64, "unknown GGUF architecture"),
])
def test_a_hostile_header_gives_one_clear_error(tmp_path, raw, message):
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as e:
        open_checkpoint(tmp_path / "m.gguf")
    assert len(str(e.value)) < 1000


def test_random_damage_to_a_header_never_gives_a_traceback(tmp_path):
    """200 mutations of a valid file: each is read or refused with a CheckpointError."""
    good = write_small(tmp_path / "m.gguf").read_bytes()
    end = good.index(b"output_norm.weight") + 120
    rng = random.Random(0)
    refused = 0
    for i in range(200):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(8, 900) if i % 2 else rng.randrange(end)
            size = rng.choice([1, 1, 4, 8])
            raw[at : at + size] = rng.choice([b"\xff" * size, b"\0" * size, rng.randbytes(size)])
        raw = raw[: rng.choice([len(raw), len(raw), rng.randrange(len(raw))])]
        (tmp_path / "m.gguf").write_bytes(raw)
        try:
            c = open_checkpoint(tmp_path / "m.gguf")
            for name in c.tensors:
                c.read(name)
            tokenizers.Tokenizer.from_str(str(c.tokenizer_json()))
        except CheckpointError:
            refused += 1
    assert refused > 100


@pytest.mark.real
def test_smollm2_opens_and_encodes_as_its_authors_tokenizer_does():
    from afl.models.locate import locate

    c = open_checkpoint(locate("smollm2", {}))
    assert c.config["num_hidden_layers"] == 30 and c.config["head_dim"] == 64 and c.config["rms_norm_eps"] == 1e-5
    assert len(c.tensors) == 272 and c.eos_ids == (2,)
    t = tokenizers.Tokenizer.from_str(str(c.tokenizer_json()))
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
           198]
    assert t.encode(system).ids == ids
    q = "model.layers.3.self_attn.q_proj.weight"
    whole = c.read(q)
    assert torch.equal(c.rows(q, 30, 90), whole[30:90])
