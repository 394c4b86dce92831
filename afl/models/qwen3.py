"""Qwen3 dense decoder (Yang et al. 2025, arXiv:2505.09388): Llama's block with norms of q and k per head."""

from collections.abc import Mapping
from typing import Any

from afl.models import llama
from afl.models.spec import ModelDef, register


def config(j: Mapping[str, Any]) -> llama.Config:
    """Config of Qwen3ForCausalLM from config.json; head_dim is a key of its own, 128 when absent."""
    return llama.read_config(j, "Qwen3ForCausalLM", eps=1e-6, max_len=32768, theta=10000.0, e=128, qk_norm=True)


register(ModelDef("Qwen3ForCausalLM", config, llama.params, llama.caches, llama.step))
