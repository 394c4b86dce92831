"""What a GGUF file means in Hugging Face terms: config.json form, tensor names, row order.

One `Family` per GGUF architecture, each checked against an oracle before it was added: a wrong guess about row
order or about an ignored key gives fluent nonsense, so every key of the family's own namespace must be understood.
"""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import attrs
import numpy as np

from afl.errors import CheckpointError, unknown
from afl.models.gguf import GgufFile, GgufStore, dtype_of
from afl.models.json_file import is_count
from afl.models.tensors import TensorInfo

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@attrs.frozen
class Family:
    """A GGUF architecture.  `permuted` lists the blocks whose rows are stored pairwise for interleaved rope."""

    architecture: str
    model_type: str
    permuted: frozenset[str] = frozenset()


FAMILIES = {
    # rope is applied interleaved by the format's own runtime, so q and k rows are stored (head, e/2, 2)
    "llama": Family("LlamaForCausalLM", "llama", frozenset({"attn_q", "attn_k"})),
    # half-split ("NeoX") rope there as in Hugging Face: rows are as they were
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
}
_KEYS = {   # GGUF key -> config.json key
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "vocab_size": "vocab_size",
}
_REQUIRED = ("num_hidden_layers", "max_position_embeddings", "hidden_size", "intermediate_size",
             "num_attention_heads", "rms_norm_eps")
_CHECKED = {  # keys with their own treatment below
    "attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear", "expert_count",
    "expert_used_count", "attention.causal",
}


def convert(file: GgufFile) -> tuple[dict[str, Any], GgufStore]:
    """(config in config.json form, tensors under Hugging Face names) of a parsed file."""
    name = file.meta.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{file.path.name}: {unknown('GGUF architecture', str(name)[:80], FAMILIES)}")
    parts = file.meta.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        raise CheckpointError(f"{file.path.name} is one of several split files; merge them first (gguf-split --merge)")
    config = _config(file, name)
    return config, _store(file, FAMILIES[name], config)


def _config(file: GgufFile, name: str) -> dict[str, Any]:
    family, at = FAMILIES[name], name + "."
    own = {k[len(at) :]: v for k, v in file.meta.items() if k.startswith(at)}
    strange = sorted(set(own) - set(_KEYS) - _CHECKED)
    if strange:
        _fail(file, f"metadata keys {', '.join(at + k for k in strange)} are not understood and could change results")
    several = sorted(k for k, v in own.items() if isinstance(v, list | np.ndarray))
    if several:
        _fail(file, f"metadata keys {', '.join(at + k for k in several)} differ by layer, which is not supported")
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {_KEYS[k]: _number(file, at + k, v) for k, v in own.items() if k in _KEYS}
    missing = [at + k for k, to in _KEYS.items() if to in _REQUIRED and to not in config]
    if missing:
        _fail(file, f"metadata lacks {', '.join(missing)}")
    h = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", h)
    config.setdefault("rope_theta", 10000.0)
    config.setdefault("head_dim", config["hidden_size"] // h)
    embed = file.blobs.get("token_embd.weight")
    config.setdefault("vocab_size", embed.shape[0] if embed else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, config["head_dim"]) != config["head_dim"]:
            _fail(file, f"{at}{key} is {str(own[key])[:40]}, but the head size is {config['head_dim']}")
    if own.get("expert_count", 0) or not own.get("attention.causal", True):
        _fail(file, "is a mixture of experts or not causal, which is not supported for this architecture")
    config["rope_scaling"] = _rope_scaling(file, own, config["head_dim"])
    config["tie_word_embeddings"] = "output.weight" not in file.blobs
    config["attention_bias"] = "blk.0.attn_q.bias" in file.blobs
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.blobs
    config["hidden_act"] = "silu"
    for kind in ("bos", "eos"):
        config[f"{kind}_token_id"] = file.meta.get(f"tokenizer.ggml.{kind}_token_id")
    return config


def _number(file: GgufFile, key: str, value: Any) -> Any:
    if type(value) is float and 0 < value < 1e12:
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06
    if not is_count(value) or not 0 < value < 1 << 31:
        _fail(file, f"metadata key {key!r} is {str(value)[:80]}; expected one positive number")
    return value


def _rope_scaling(file: GgufFile, own: Mapping[str, Any], e: int) -> dict[str, Any] | None:
    """Per-channel factors when the file has `rope_freqs.weight` (that is how Llama-3 scaling is stored): channel i
    turns by `theta^(-2i/e) / factors[i]` per position.  Otherwise what the scaling keys say, for the model to judge."""
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    kind = own.get("rope.scaling.type", None if factor is None else "linear")
    if "rope_freqs.weight" in file.blobs:
        blob = file.blobs["rope_freqs.weight"]
        if blob.shape != (e // 2,) or kind not in (None, "none"):
            _fail(file, f"rope_freqs.weight has shape {list(blob.shape)} for head size {e}, scaling {str(kind)[:40]!r}")
        factors = file.rows("rope_freqs.weight", slice(0, e // 2)).float()
        if not bool((factors > 0).all()) or not bool(factors.isfinite().all()):
            _fail(file, "rope_freqs.weight must be positive and finite")
        return {"rope_type": "factors", "factors": factors.tolist()}
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    original = own.get("rope.scaling.original_context_length")
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _store(file: GgufFile, family: Family, config: Mapping[str, Any]) -> GgufStore:
    names, order, tensors = {}, {}, {}
    for raw, blob in file.blobs.items():
        if raw == "rope_freqs.weight":
            continue
        block = _BLOCK.fullmatch(raw)
        if block and block[2] in _LAYER:
            name = f"model.layers.{block[1]}.{_LAYER[block[2]]}.{block[3]}"
        else:
            name = _GLOBAL.get(raw, raw)  # an unknown tensor keeps its name, and is reported as unused
        if name in names:
            _fail(file, f"tensors {names[name]!r} and {raw!r} both mean {name}")
        names[name] = raw
        tensors[name] = TensorInfo(blob.shape, dtype_of(blob.kind), blob.kind, file.path)
        if block and block[2] in family.permuted:
            e, rows = config["head_dim"], blob.shape[0]
            if e % 2 or rows % e:
                _fail(file, f"tensor {raw!r} has {rows} rows, which are not heads of {e}")
            order[name] = np.arange(rows).reshape(-1, e // 2, 2).swapaxes(1, 2).reshape(-1)
    return GgufStore(file, names, order, tensors)


def _fail(file: GgufFile, what: str) -> NoReturn:
    raise CheckpointError(f"{file.path.name}: {what[:600]}")
