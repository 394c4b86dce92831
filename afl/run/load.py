"""From a name on the command line to a `Model`: find the checkpoint, check everything, then read the weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from afl import config as configs
from afl.config import EngineConfig
from afl.errors import AflError, ConfigError
from afl.models.checkpoint import Checkpoint, open_checkpoint
from afl.models.locate import locate
from afl.models.weights import load_params, random_params, tied_head
from afl.ops.layouts import layout
from afl.plugins import chip as chip_named
from afl.plugins import model as model_named
from afl.run.model import Model
from afl.types import DTYPES

DEFAULT_MODEL = "smollm2"
Progress = Callable[[int, int], None]      # (bytes done, bytes in all)


def load(
    model: str | Path = DEFAULT_MODEL, *, config: EngineConfig | None = None, progress: Progress | None = None, **options: Any
) -> Model:
    """The model at a path, under an alias, or in the local Hugging Face cache.  Nothing is downloaded.

    options: fields of EngineConfig (chip="cpu", dtype="float32", ...), instead of `config`.
    Raises a BadInput with one clear message before a weight is read if anything does not hold.
    """
    config = config or EngineConfig.of(options)
    chip = chip_named(config.chip)
    set_threads(config.threads)
    checkpoint = open_checkpoint(locate(str(model), configs.environment()))
    definition = _definition(checkpoint)
    tied, notice = tied_head(_says_tied(checkpoint.config), checkpoint)
    c = definition.config({**checkpoint.config, "tie_word_embeddings": tied})
    dtype = choose_dtype(config.dtype, chip, checkpoint.config)
    text = _text(checkpoint)
    params, report = load_params(
        definition.params(c), checkpoint, dtype=dtype, empty=empty_for(chip), ignore=definition.ignore, progress=progress
    )
    notices = (*checkpoint.notices, *((notice,) if notice else ()), *report.notices)
    eos_ids = checkpoint.eos_ids if text is None else text.tokenizer.eos_ids
    return Model(definition, c, params, chip, dtype, config, text, eos_ids, checkpoint.generation_config, notices)


def random_model(architecture: str, settings: Mapping[str, Any], *, seed: int = 0, **options: Any) -> Model:
    """A model with random weights from config.json's `settings`; for tests, benches and notebooks."""
    config = EngineConfig.of(options)
    chip = chip_named(config.chip)
    definition = model_named(architecture)
    c = definition.config(settings)
    dtype = choose_dtype(config.dtype, chip, settings)
    return Model(definition, c, random_params(definition.params(c), seed, dtype, empty_for(chip)), chip, dtype, config)


def empty_for(chip: Any) -> Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]:
    """Allocator of parameters in the chip's layout for their role."""
    return lambda role, shape, dtype: layout(chip.layouts.get(role, "nd")).empty(shape, dtype)


def choose_dtype(wish: str, chip: Any, settings: Mapping[str, Any]) -> torch.dtype:
    """The compute dtype: the wish if the chip has it; "auto" is the chip's first."""
    name = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}.get(wish, wish)
    if name == "auto":
        name = chip.dtypes[0]
    if name not in chip.dtypes:
        raise ConfigError(f"dtype {wish!r} is not one of chip {chip.name!r}: auto, {', '.join(chip.dtypes)}")
    return DTYPES[name]


def set_threads(threads: int) -> int:
    """Threads of torch's operators in this process: the wish, or one per usable core, never more than those."""
    cores = configs.usable_cores()
    if threads > cores:
        raise ConfigError(f"threads {threads} is more than the {cores} cores this process may use; more only slows it down")
    n = threads or cores
    if torch.get_num_threads() != n:
        torch.set_num_threads(n)
    return n


def _definition(checkpoint: Checkpoint) -> Any:
    errors = []
    for name in checkpoint.config["architectures"]:
        try:
            return model_named(name)
        except AflError as e:
            errors.append(e)
    raise errors[0]


def _says_tied(settings: Mapping[str, Any]) -> bool:
    value = settings.get("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"tie_word_embeddings must be true or false, is {value!r}")
    return bool(value)


def _text(checkpoint: Checkpoint) -> Any:
    from afl.run.chat import Text

    return Text.of(checkpoint) if checkpoint.tokenizer_json is not None else None


def describe(model: Model) -> dict[str, Any]:
    """Name, sizes and options of a model as plain values; for `afl inspect model` and `--stats`."""
    c = attrs.asdict(model.c, recurse=False)
    c.pop("rope", None)
    return {
        "architecture": model.definition.name, "chip": model.chip.name, "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.param_bytes // model.dtype.itemsize, "param_bytes": model.param_bytes, **c,
    }
