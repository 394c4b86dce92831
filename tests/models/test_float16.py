"""A checkpoint on a chip that has float16 only: converted exactly as rounding does, or refused by a tensor's name."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_gguf import TOKENS, E, write_model

import afl
from afl import tree
from afl.errors import CheckpointError, ConfigError
from afl.layout import plain

NAMES = ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight",
         "model.embed_tokens.weight", "lm_head.weight")
VALUES = (65505.0, -1e9, float("inf"), float("nan"))


def changed(folder: Path, dtype: torch.dtype, name: str | None = None, value: float = 0.0) -> Path:
    """The checkpoint in another dtype, with one element of one tensor replaced."""
    file = folder / "model.safetensors"
    tensors = {n: x.to(dtype) for n, x in load_file(file).items()}
    if name is not None:
        tensors[name].view(-1)[-1] = value
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_weights_are_rounded_to_float16_and_lie_as_the_chip_wants_them(tmp_path: Path, dtype: torch.dtype):
    largest = 65504.0 if dtype == torch.float32 else 65280.0
    path = changed(tiny.folder(tmp_path), dtype, "model.layers.0.mlp.up_proj.weight", largest)
    same, cpu = afl.load(path, chip="310p"), afl.load(path, chip="cpu", dtype="float32")
    assert same.dtype == torch.float16 and same.params.layers[0].gate_up.w.afl_fmt == "nz"
    for (name, x), (_, y) in zip(tree.paths(same.params), tree.paths(cpu.params), strict=True):
        assert torch.equal(plain(x), plain(y).half()), name


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_float16_cannot_hold_is_named(tmp_path: Path, name: str, value: float):
    path = changed(tiny.folder(tmp_path), torch.float32, name, value)
    with pytest.raises(CheckpointError, match=f"{name}: .*float16 cannot represent"):
        afl.load(path, chip="310p")


def test_a_large_bfloat16_weight_is_refused_where_bfloat16_is_not_to_be_had(tmp_path: Path):
    path = changed(tiny.folder(tmp_path), torch.bfloat16, NAMES[0], 1e6)
    with pytest.raises(CheckpointError, match=f"{NAMES[0]}: BF16.* float16 cannot represent"):
        afl.load(path, chip="310p")
    assert afl.load(path, chip="a2", dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("value", VALUES)
def test_a_tensor_of_a_gguf_file_that_float16_cannot_hold_is_named(tmp_path: Path, value: float):
    import transformers as hf

    sizes = dict(vocab_size=len(TOKENS), hidden_size=96, intermediate_size=160, num_hidden_layers=2,
                 num_attention_heads=3, num_key_value_heads=1, head_dim=E, max_position_embeddings=128)
    torch.manual_seed(0)
    weights = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).state_dict()
    weights["model.layers.1.self_attn.q_proj.weight"][5, 7] = value           # rows that the file holds permuted
    write_model(tmp_path / "m.gguf", "llama", weights)
    with pytest.raises(CheckpointError, match=r"model.layers.1.self_attn.q_proj.weight: F32.*float16 cannot represent"):
        afl.load(tmp_path / "m.gguf", chip="310p")


@pytest.mark.parametrize("value", VALUES)
def test_matrices_held_in_float16_under_a_wider_computation_are_checked_too(tmp_path: Path, value: float):
    path = changed(tiny.folder(tmp_path), torch.float32, NAMES[0], value)
    with pytest.raises(CheckpointError, match=f"{NAMES[0]}: .*float16 cannot represent"):
        afl.load(path, chip="cpu", dtype="float32", weights="float16")


def test_another_dtype_is_refused_by_the_chip_with_the_list(tmp_path: Path):
    with pytest.raises(ConfigError, match="'bfloat16' is not one of chip '310p': auto, float16"):
        afl.load(tiny.folder(tmp_path), chip="310p", dtype="bfloat16")
