"""What a model declares: its parameters (`ParamSpec`), its caches and its step (`ModelDef`)."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from afl.errors import ConfigError, unknown


@attrs.frozen
class ParamSpec:
    """One parameter: abstract type, shard axes, checkpoint entries, layout role.

    `source` names the checkpoint tensors (Hugging Face names); several are concatenated along `cat`, in order, each
    with the rows given by `parts`.  `axes` are logical axis names for sharding.  `dtype` None means the model's dtype.
    """

    shape: tuple[int, ...]
    role: str                                # "linear.weight", "norm.gamma", "embed.weight", ...
    source: tuple[str, ...]
    axes: tuple[str | None, ...] = ()
    cat: int = 0
    parts: tuple[int, ...] = ()              # sizes along `cat`, one per source; empty for a single source
    dtype: str | None = None
    init: str = "normal"                     # "normal", "ones", "zeros": for random parameters

    def part_shape(self, i: int) -> tuple[int, ...]:
        """The shape that source `i` must have in the checkpoint."""
        if not self.parts:
            return self.shape
        return (*self.shape[: self.cat], self.parts[i], *self.shape[self.cat + 1 :])


@attrs.frozen
class ModelDef:
    """A model family as four pure functions.

    config: checkpoint config dict -> Config (frozen, with at least `layers d h k e v max_len`)
    params: Config -> tree of ParamSpec
    caches: Config -> tuple of CacheSpec, one per layer
    step:   (params, state, batch, *, c) -> (state, logits f32[r, v])
    ignore: regular expressions of checkpoint tensors that are known and not used, each with its reason
    """

    name: str
    config: Callable[[Mapping[str, Any]], Any]
    params: Callable[[Any], Any]
    caches: Callable[[Any], tuple[Any, ...]]
    step: Callable[..., Any]
    ignore: Mapping[str, str] = attrs.field(factory=dict)


_MODELS: dict[str, ModelDef] = {}


def register(model: ModelDef) -> ModelDef:
    """Make a model known by the architecture name of config.json."""
    if model.name in _MODELS:
        raise ConfigError(f"model {model.name!r} is defined twice; rename one of the two")
    _MODELS[model.name] = model
    return model


def registered() -> dict[str, ModelDef]:
    """Models whose files have been imported, by architecture name."""
    return dict(sorted(_MODELS.items()))


def get(architecture: str) -> ModelDef:
    """The model of that architecture name, or an error with the list and the nearest name."""
    if architecture not in _MODELS:
        raise ConfigError(unknown("architecture", architecture, _MODELS))
    return _MODELS[architecture]
