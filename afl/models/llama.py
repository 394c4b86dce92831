"""Llama decoder (Touvron et al. 2023, arXiv:2302.13971): grouped-query attention, rotary positions, SwiGLU, RMS norms.

Covers Llama 2 and 3 with its rope scaling, SmolLM2 and their distills; tied and untied heads.
"""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from afl.dist.collectives import all_reduce
from afl.models.batch import Batch, ModelState
from afl.models.config_keys import Keys
from afl.models.layers import dense, gamma, repeat
from afl.models.rope_config import Rope, rope_of
from afl.models.spec import ModelDef, ParamSpec, register
from afl.ops.act import swiglu
from afl.ops.caches.paged_kv import PagedKV, PagedKVSpec, attend, write
from afl.ops.embed import last_rows, lookup
from afl.ops.linear import Dense, project, score
from afl.ops.norm import add_rms_norm, rms_norm
from afl.ops.rope import rope, rope_angles, split_qkv
from afl.tree import evolve, struct


@attrs.frozen
class Config:
    """Sizes by the letters of the glossary; `qk_norm` and the biases are what sets the family's members apart."""

    layers: int
    d: int
    h: int
    k: int
    e: int
    f: int
    v: int
    max_len: int
    eps: float
    rope: Rope
    tied: bool
    bias: bool = False          # on q, k, v and the output projection
    mlp_bias: bool = False
    qk_norm: bool = False


def config(j: Mapping[str, Any]) -> Config:
    """Config of LlamaForCausalLM from config.json."""
    return read_config(j, "LlamaForCausalLM", eps=1e-6, max_len=2048, theta=10000.0)


def read_config(j: Mapping[str, Any], name: str, eps: float, max_len: int, theta: float, **more: Any) -> Config:
    """The keys that Llama's descendants share; `more` sets fields that the config does not name."""
    keys = Keys(j, name)
    d, h = keys.size("hidden_size"), keys.size("num_attention_heads")
    k = keys.size("num_key_value_heads", default=h)
    e = keys.size("head_dim", default=more.pop("e", None) or max(d // h, 1))
    keys.require(h % k == 0, f"num_attention_heads ({h}) must be a multiple of num_key_value_heads ({k})")
    keys.only("hidden_act", ("silu", "swish"), "only silu is computed")
    keys.only("pretraining_tp", (1, None), "only 1 is computed")
    keys.only("use_sliding_window", (False, None), "sliding windows are not computed by this model")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        keys.only(key, (None, 0, 1), "experts are not computed by this model")
    c = dict(
        layers=keys.size("num_hidden_layers", high=4096), d=d, h=h, k=k, e=e, f=keys.size("intermediate_size"),
        v=keys.size("vocab_size"), max_len=keys.size("max_position_embeddings", default=max_len, high=1 << 30),
        eps=keys.number("rms_norm_eps", eps), tied=keys.flag("tie_word_embeddings", False),
        bias=keys.flag("attention_bias", False), mlp_bias=keys.flag("mlp_bias", False),
    )
    keys.done()
    return Config(**c, rope=rope_of(j, e, theta), **more)


@struct
class Layer:
    attn_norm: Tensor                # [d]
    qkv: Dense                       # [(h+2k)*e, d]
    q_norm: Tensor | None            # [e], absent unless qk_norm
    k_norm: Tensor | None
    out: Dense                       # [d, h*e]
    mlp_norm: Tensor                 # [d]
    gate_up: Dense                   # [2f, d]
    down: Dense                      # [d, f]


@struct
class Params:
    embed: Tensor                    # [v, d]
    layers: tuple[Layer, ...]
    norm: Tensor                     # [d]
    head: Tensor | None              # [v, d], absent when tied to embed


def params(c: Config) -> Params:
    at, heads = "model.layers.{i}.", {"q": c.h * c.e, "k": c.k * c.e, "v": c.k * c.e}
    layer = Layer(
        attn_norm=gamma(c.d, at + "input_layernorm"),  # type: ignore[arg-type]
        qkv=dense(c.d, heads, at + "self_attn.*_proj", ("heads", None), c.bias),
        q_norm=gamma(c.e, at + "self_attn.q_norm") if c.qk_norm else None,  # type: ignore[arg-type]
        k_norm=gamma(c.e, at + "self_attn.k_norm") if c.qk_norm else None,  # type: ignore[arg-type]
        out=dense(c.h * c.e, {"o": c.d}, at + "self_attn.*_proj", (None, "heads"), c.bias),
        mlp_norm=gamma(c.d, at + "post_attention_layernorm"),  # type: ignore[arg-type]
        gate_up=dense(c.d, {"gate": c.f, "up": c.f}, at + "mlp.*_proj", ("ffn", None), c.mlp_bias),
        down=dense(c.f, {"down": c.d}, at + "mlp.*_proj", (None, "ffn"), c.mlp_bias),
    )
    # also when it serves as head: rows are looked up in it, which fewer layouts allow
    table = ParamSpec((c.v, c.d), "embed.weight", ("model.embed_tokens.weight",), ("vocab", None))
    head = None if c.tied else ParamSpec((c.v, c.d), "head.weight", ("lm_head.weight",), ("vocab", None))
    return Params(table, repeat(layer, c.layers), gamma(c.d, "model.norm"), head)  # type: ignore[arg-type]


def caches(c: Config) -> tuple[PagedKVSpec, ...]:
    return (PagedKVSpec(c.k, c.e),) * c.layers


def attention(p: Layer, x: Any, cache: PagedKV, batch: Batch, cos: Any, sin: Any, *, c: Config) -> tuple[PagedKV, Any]:
    q, k, v = split_qkv(project(x, p.qkv), h=c.h, k=c.k, e=c.e)                     # [t h e] [t k e] [t k e]
    if p.q_norm is not None:
        q, k = rms_norm(q, p.q_norm, eps=c.eps), rms_norm(k, p.k_norm, eps=c.eps)
    q, k = rope(q, cos, sin), rope(k, cos, sin)
    cache = write(cache, k, v, batch)
    o = attend(q, cache, batch, scale=c.e**-0.5)                                  # [t h e]
    return cache, all_reduce(project(o.reshape(-1, c.h * c.e), p.out), axis="tp")


def mlp(p: Layer, x: Any) -> Any:
    return all_reduce(project(swiglu(project(x, p.gate_up)), p.down), axis="tp")


def step(p: Params, state: ModelState, batch: Batch, *, c: Config) -> tuple[ModelState, Any]:
    """(state', logits f32[r, v]) of the last token of each row."""
    cos, sin = rope_angles(batch.position, inv_freq=c.rope.inv_freq, scale=c.rope.scale)
    r = lookup(p.embed, batch.token, p.norm.dtype)                                # [t d]
    x, new = None, []
    for layer, cache in zip(p.layers, state.caches, strict=True):
        if x is None:
            y = rms_norm(r, layer.attn_norm, eps=c.eps)
        else:
            y, r = add_rms_norm(x, r, layer.attn_norm, eps=c.eps)
        cache, x = attention(layer, y, cache, batch, cos, sin, c=c)
        y, r = add_rms_norm(x, r, layer.mlp_norm, eps=c.eps)
        x = mlp(layer, y)
        new.append(cache)
    y, _ = add_rms_norm(last_rows(x, batch.q_start), last_rows(r, batch.q_start), p.norm, eps=c.eps)
    return evolve(state, caches=tuple(new)), score(p.embed if p.head is None else p.head, y)


register(ModelDef("LlamaForCausalLM", config, params, caches, step, ignore={
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "recomputed from config.json",
}))
