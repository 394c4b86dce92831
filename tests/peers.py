"""The same weights in other people's implementations."""

import warnings

from afl import tree
from afl.layout import plain


def as_transformers(m):
    """The same weights in transformers' Llama, float32."""
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM

    c, params = m.c, tree.map(plain, m.params)
    theta = float(c.rope.inv_freq[1] ** (-c.e / 2)) if len(c.rope.inv_freq) > 1 else 10000.0
    config = LlamaConfig(
        hidden_size=c.d,
        intermediate_size=c.f,
        num_hidden_layers=c.layers,
        num_attention_heads=c.h,
        num_key_value_heads=c.k,
        head_dim=c.e,
        vocab_size=c.v,
        rms_norm_eps=c.eps,
        tie_word_embeddings=c.tied,
        max_position_embeddings=c.max_len,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=None,
        eos_token_id=None,
    )
    peer = LlamaForCausalLM(config).eval()
    sd = {"model.embed_tokens.weight": params.embed, "model.norm.weight": params.norm}
    sd["lm_head.weight"] = params.embed if params.head is None else params.head
    for i, p in enumerate(params.layers):
        at = f"model.layers.{i}."
        q, k, v = p.qkv.w.split([c.h * c.e, c.k * c.e, c.k * c.e])
        gate, up = p.gate_up.w.split([c.f, c.f])
        sd |= {
            at + "self_attn.q_proj.weight": q,
            at + "self_attn.k_proj.weight": k,
            at + "self_attn.v_proj.weight": v,
            at + "self_attn.o_proj.weight": p.out.w,
            at + "mlp.gate_proj.weight": gate,
            at + "mlp.up_proj.weight": up,
            at + "mlp.down_proj.weight": p.down.w,
            at + "input_layernorm.weight": p.attn_norm,
            at + "post_attention_layernorm.weight": p.mlp_norm,
        }
    peer.load_state_dict({n: t.contiguous() for n, t in sd.items()})
    return peer
