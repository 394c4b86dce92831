"""From a name on the command line to a `Model`: find the checkpoint, check everything, then read the weights."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from afl import config as configs
from afl.chip import DTYPE_ALIASES, Chip
from afl.config import EngineConfig
from afl.errors import AflError, ConfigError
from afl.models.checkpoint import Checkpoint, open_checkpoint
from afl.models.locate import locate
from afl.models.spec import ModelDef
from afl.models.weights import LoadPlan, load_params, plan_load, random_params, tied_head
from afl.plugins import chip as chip_named
from afl.plugins import model as model_named
from afl.run.ask import Ask
from afl.run.chat import Text
from afl.run.model import Model
from afl.run.precision import stores
from afl.run.rules import OF_MODELS, problems, refuse
from afl.types import DTYPES

DEFAULT_MODEL = "smollm2"
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@attrs.frozen(eq=False)
class Outline:
    """A checked checkpoint whose weights have not been read.

    `model` has types for parameters: it can be traced, explained and planned, and it encodes text.  `read` gives the
    one that also runs.
    """

    model: Model
    checkpoint: Checkpoint
    specs: Any  # tree of ParamSpec
    plan: LoadPlan

    def read(self, progress: Progress | None = None) -> Model:
        """The model with its weights."""
        m = self.model
        params, report = load_params(
            self.specs,
            self.checkpoint,
            dtype=m.dtype,
            layout_of=stores(m.chip, m.config.weights, m.dtype),
            ignore=m.definition.ignore,
            progress=progress,
        )
        return attrs.evolve(m, params=params, notices=(*m.notices, *report.notices))


def outline(model: str | Path = DEFAULT_MODEL, config: EngineConfig | None = None) -> Outline:
    """Find and check a checkpoint.  Raises a BadInput with one clear message if anything does not hold."""
    config = config or EngineConfig()
    chip = chip_named(config.chip)
    set_threads(config.threads)
    checkpoint = open_checkpoint(locate(str(model), configs.environment()))
    tied, notice = tied_head(_says_tied(checkpoint.config), checkpoint)
    settings = {**checkpoint.config, "tie_word_embeddings": tied}
    definition, ask = asked(settings, config, chip, most_stored(checkpoint.tensors))
    made = abstract_model(definition, ask)
    specs = made.definition.params(made.c)
    plan = plan_load(specs, checkpoint.tensors, made.definition.ignore)
    text = Text.of(checkpoint) if checkpoint.tokenizer_json is not None else None
    eos_ids = checkpoint.eos_ids if text is None else text.tokenizer.eos_ids
    notices = (*checkpoint.notices, *((notice,) if notice else ()))
    made = attrs.evolve(
        made, text=text, eos_ids=eos_ids, generation_config=checkpoint.generation_config, notices=notices
    )
    return Outline(made, checkpoint, specs, plan)


def abstract_model(definition: ModelDef | None, ask: Ask) -> Model:
    """A model with types for parameters.  Raises ConfigError with everything that does not hold."""
    refuse(ask)
    assert definition is not None and ask.chip is not None and ask.dtype is not None, "the rules hold"
    return Model(definition, ask.c, (), ask.chip, DTYPES[ask.dtype], ask.config).resized(ask.c)


def asked(
    settings: Mapping[str, Any], config: Any, chip: Chip, stored: str = "", **ranks: Any
) -> tuple[ModelDef | None, Ask]:
    """All that rules can look at before a weight is read, and the definition of the model if there is one.

    settings: config.json.  config: an EngineConfig or a `Wish`.  stored: dtype of the checkpoint.  ranks: tp, pp, ...
    """
    ask = Ask(config, chip, settings=settings, **ranks)
    wrong = {v.rule for v in problems(ask)}
    if wrong & OF_MODELS:
        return None, ask
    definition = definition_of(settings)
    c = definition.config(settings)
    dtype = choose_dtype("auto" if "dtype of the chip" in wrong else config.dtype, chip, stored)
    name = str(dtype).removeprefix("torch.")
    return definition, attrs.evolve(ask, c=c, caches=definition.caches(c), max_len=c.max_len, dtype=name)


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    config: EngineConfig | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Model:
    """The model at a path, under an alias, or in the local Hugging Face cache.  Nothing is downloaded.

    options: fields of EngineConfig (chip="cpu", dtype="float32", ...), instead of `config`.
    Raises a BadInput with one clear message before a weight is read if anything does not hold.
    """
    return outline(model, config or EngineConfig.of(options)).read(progress)


def random_model(architecture: str, settings: Mapping[str, Any], *, seed: int = 0, **options: Any) -> Model:
    """A model with random weights from config.json's `settings`; for tests, benches and notebooks."""
    config = EngineConfig.of(options)
    chip = chip_named(config.chip)
    definition, ask = asked({**settings, "architectures": [architecture]}, config, chip)
    m = abstract_model(definition, ask)
    params = random_params(m.definition.params(m.c), seed, m.dtype, stores(chip, config.weights, m.dtype))
    return attrs.evolve(m, params=params)


def choose_dtype(wish: str, chip: Chip, stored: str = "") -> torch.dtype:
    """The compute dtype: the wish, which the chip must have (`afl/run/rules.py`).

    "auto" is the chip's first; a chip of 16-bit dtypes takes the one that the checkpoint is `stored` in if it has that.
    """
    name = DTYPE_ALIASES.get(wish, wish)
    if name == "auto":
        first = chip.dtypes[0]
        name = stored if stored in chip.dtypes and DTYPES[first].itemsize == 2 else first
    return DTYPES[name]


def most_stored(tensors: Mapping[str, Any]) -> str:
    """The dtype that most numbers of a checkpoint are read in; quantised blocks are read in float32."""
    counts: Counter[str] = Counter()
    for info in tensors.values():
        counts[info.dtype] += math.prod(info.shape)
    return max(counts, key=counts.__getitem__, default="")


def set_threads(threads: int) -> int:
    """Threads of torch's operators in this process: the wish, or one per usable core, never more than those.

    A forked process has one: the pool's threads stay behind in the parent, and the first parallel operator would wait
    for them for ever.
    """
    if configs.forked():
        if threads > 1:
            raise ConfigError(
                f"threads is {threads}, but this process was forked, and torch's threads are not there; "
                "start it with the method 'spawn', or ask for one thread"
            )
        threads = 1
    cores = configs.usable_cores()
    n = min(threads or cores, cores)
    if torch.get_num_threads() != n:
        torch.set_num_threads(n)
    return n


def definition_of(settings: Mapping[str, Any]) -> ModelDef:
    """The definition of the first architecture in config.json that there is one for."""
    errors = []
    for name in settings["architectures"]:
        try:
            return model_named(name)
        except AflError as e:
            errors.append(e)
    raise errors[0]


def _says_tied(settings: Mapping[str, Any]) -> bool:
    """Whether config.json says that the output head is the embedding."""
    value = settings.get("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"tie_word_embeddings must be true or false, is {value!r}")
    return bool(value)


def describe(model: Model) -> dict[str, Any]:
    """Name, sizes and options of a model as plain values; for `afl inspect model` and `--stats`."""
    c = attrs.asdict(model.c, recurse=False)
    c.pop("rope", None)
    return {
        "architecture": model.definition.name,
        "chip": model.chip.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.config.weights,
        "parameters": model.parameters,
        "param_bytes": model.param_bytes,
        **c,
    }
