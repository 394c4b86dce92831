"""A checkpoint as a `Model` whose parameters are types: everything is checked, no weight is read."""

from pathlib import Path
from typing import Any

import attrs

from afl import config as configs
from afl import tree
from afl.config import EngineConfig
from afl.models.checkpoint import Checkpoint, open_checkpoint
from afl.models.locate import locate
from afl.models.weights import LoadPlan, load_params, plan_load, tied_head
from afl.ops.layouts import layout
from afl.plugins import chip as chip_named
from afl.run import load as loader
from afl.run.load import Progress
from afl.run.model import Model
from afl.types import DTYPES, TensorType


@attrs.frozen(eq=False)
class Outline:
    """`model` can be traced, explained and planned, and encodes text; `read` gives the one that also runs."""

    model: Model
    checkpoint: Checkpoint
    specs: Any                  # tree of ParamSpec
    plan: LoadPlan

    def read(self, progress: Progress | None = None) -> Model:
        """The model with its weights."""
        m = self.model
        params, report = load_params(
            self.specs, self.checkpoint, dtype=m.dtype, empty=loader.empty_for(m.chip), ignore=m.definition.ignore,
            progress=progress,
        )
        return attrs.evolve(m, params=params, notices=(*m.notices, *report.notices))


def outline(model: str | Path, config: EngineConfig) -> Outline:
    """Find and check a checkpoint.  Raises a BadInput with one clear message if anything does not hold."""
    chip = chip_named(config.chip)
    loader.set_threads(config.threads)
    checkpoint = open_checkpoint(locate(str(model), configs.environment()))
    definition = loader._definition(checkpoint)
    tied, notice = tied_head(loader._says_tied(checkpoint.config), checkpoint)
    c = definition.config({**checkpoint.config, "tie_word_embeddings": tied})
    dtype = loader.choose_dtype(config.dtype, chip, checkpoint.config)
    specs = definition.params(c)
    plan = plan_load(specs, checkpoint.tensors, definition.ignore)

    def type_of(spec: Any) -> TensorType:
        fmt = layout(chip.layouts.get(spec.role, "nd")).fmt
        return TensorType(spec.shape, dtype if spec.dtype is None else DTYPES[spec.dtype], fmt)

    text = loader._text(checkpoint)
    eos = checkpoint.eos_ids if text is None else text.tokenizer.eos_ids
    notices = (*checkpoint.notices, *((notice,) if notice else ()))
    params = tree.map(type_of, specs)
    made = Model(definition, c, params, chip, dtype, config, text, eos, checkpoint.generation_config, notices)
    return Outline(made, checkpoint, specs, plan)
