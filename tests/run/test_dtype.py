"""`--dtype auto`: by the chip, and on chips of 16-bit dtypes by what the checkpoint is stored in."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_gguf import write_small

from afl import plugins
from afl.chip import F, registered
from afl.config import EngineConfig
from afl.models.checkpoint import open_checkpoint
from afl.run.load import choose_dtype, most_stored, outline

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same small model in three dtypes; its norms stay float32."""
    made = {}
    for name, dtype in DTYPES.items():
        made[name] = tiny.folder(tmp_path_factory.mktemp(name))
        file = made[name] / "model.safetensors"
        save_file({k: v if v.dim() == 1 else v.to(dtype) for k, v in load_file(file).items()}, file, {"format": "pt"})
    return made


WANT = {
    "cpu": {"float32": "float32", "bfloat16": "float32", "float16": "float32"},
    "310p": {"float32": "float16", "bfloat16": "float16", "float16": "float16"},
    "a2": {"float32": "bfloat16", "bfloat16": "bfloat16", "float16": "float16"},
}
WANT |= {"a3": WANT["a2"], "a5": WANT["a2"]}


@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("chip", WANT)
def test_auto_takes_the_chips_dtype_or_the_checkpoints_16_bit_one(stored, chip, kept):
    assert outline(stored[kept], EngineConfig.of({"chip": chip})).model.dtype is DTYPES[WANT[chip][kept]]


def test_a_wish_counts_more_than_what_is_stored(stored):
    wish = EngineConfig.of({"chip": "a3", "dtype": "f16"})
    assert outline(stored["bfloat16"], wish).model.dtype is torch.float16


def test_quantised_blocks_mean_the_chips_first(tmp_path: Path):
    kept = most_stored(open_checkpoint(write_small(tmp_path / "x.gguf")).tensors)
    assert kept == "float32" and choose_dtype("auto", plugins.chip("a3"), kept) is torch.bfloat16


def test_the_table_names_every_chip_of_this_package():
    plugins.load_ops()
    assert {c.name for c in registered().values() if F.NPU in c.features} | {"cpu"} <= set(WANT)
