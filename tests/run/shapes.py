"""config.json of published models, sizes only."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def llama(layers: int, d: int, h: int, k: int, f: int, v: int = 128256, **more: object) -> dict:
    """A Llama 3.1 of these sizes; `more` are other keys."""
    return dict(
        architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16", num_hidden_layers=layers,
        hidden_size=d, num_attention_heads=h, num_key_value_heads=k, intermediate_size=f, vocab_size=v,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA3,
        tie_word_embeddings=False, hidden_act="silu", attention_bias=False, mlp_bias=False, use_cache=True,
    ) | more


LLAMA_70B = llama(80, 8192, 64, 8, 28672)
LLAMA_405B = llama(126, 16384, 128, 8, 53248)
TINY = llama(32, 64, 8, 4, 96, 192, head_dim=16, max_position_embeddings=512, rope_scaling=None)
