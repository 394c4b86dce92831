"""A loaded model as a value: definition, config, parameters and text layer.  The functional API of notebooks."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import attrs
import torch

from afl import tree
from afl.chip import Chip
from afl.config import EngineConfig
from afl.errors import ConfigError
from afl.ir.graph import Graph
from afl.ir.kernel import Choice, explain
from afl.ir.trace import Eager, current, trace, using
from afl.layout import stored_bytes, zeros
from afl.models.batch import Batch, ModelState
from afl.models.spec import ModelDef
from afl.run.memory import tokens_of_block
from afl.run.precision import stores
from afl.types import DTYPES, HostIntsType, TensorType


@attrs.frozen(eq=False, repr=False)
class Model:
    """params: tree of tensors in the chip's layouts.  text: tokenizer and chat template, None for random weights."""

    definition: ModelDef
    c: Any
    params: Any
    chip: Chip
    dtype: torch.dtype
    config: EngineConfig = EngineConfig()
    text: Any = None
    eos_ids: tuple[int, ...] = ()  # ids that end a sequence: config, generation config and tokenizer together
    generation_config: dict[str, Any] = attrs.field(factory=dict)
    notices: tuple[str, ...] = ()

    @cached_property
    def caches(self) -> tuple[Any, ...]:
        """One CacheSpec per layer."""
        return self.definition.caches(self.c)

    def state_types(self, blocks: int, block_tokens: int, rows: int) -> ModelState:
        """The state as types; `blocks` are usable ones, the null block comes on top."""
        caches = tuple(s.types(self.chip, blocks + 1, block_tokens, self.dtype) for s in self.caches)
        return ModelState(caches, TensorType((rows,), torch.int32))  # type: ignore[arg-type]

    def init_state(self, blocks: int = 64, block_tokens: int = 0, rows: int = 8) -> ModelState:
        """An empty state: zeroed caches of `blocks` usable blocks, `rows` device rows."""
        types = self.state_types(blocks, tokens_of_block(self.caches, self.chip, block_tokens), rows)
        return tree.map(lambda t: zeros(t.shape, t.dtype, t.fmt), types)

    def step(self, params: Any, state: ModelState, batch: Batch) -> tuple[ModelState, Any]:
        """(state', logits f32[r, v]): the model's pure step, traced or run by whatever interpreter is current.

        Outside of tracing it runs eagerly on the model's chip and leaves `state` untouched.
        """
        if isinstance(current(), Eager) and current().chip is not self.chip:
            with using(Eager(self.chip)):
                return self.definition.step(params, state, batch, c=self.c)
        return self.definition.step(params, state, batch, c=self.c)

    def batch_types(self, tokens: int, rows: int, width: int = 4) -> Batch:
        """A batch as types: `tokens` tokens of `rows` rows with tables of `width` blocks."""

        def i32(*shape: int) -> Any:
            return TensorType(shape, torch.int32)

        host: Any = HostIntsType
        return Batch(
            i32(tokens),
            i32(tokens),
            (i32(tokens),),
            i32(rows + 1),
            i32(rows),
            (i32(rows, width),),
            i32(rows),
            host(rows + 1),
            host(rows),
        )

    def graph(self, phase: str = "decode", rows: int = 4, tokens: int = 0) -> Graph:
        """The traced step: "decode" has one token per row, "prefill" has `tokens` (16 per row when not given)."""
        if phase not in ("decode", "prefill"):
            raise ConfigError(f"phase {phase!r} is neither 'decode' nor 'prefill'")
        count = rows if phase == "decode" else tokens or 16 * rows
        state = self.state_types(64, tokens_of_block(self.caches, self.chip), rows)
        args = self.params, state, self.batch_types(count, rows)
        return trace(self.step, *args, tags=("param", "state", "batch")).graph

    def explain(self, op: str | None = None, rows: int = 4) -> list[Choice]:
        """Which kernel each op of the decode step gets on this chip, and why not the others; once per op and types."""
        found: dict[Any, Choice] = {}
        for e in self.graph(rows=rows).eqns:
            types = tuple(v.type if v is not None else None for v in e.ins)
            if op in (None, e.op.name) and (e.op.name, types) not in found:
                found[e.op.name, types] = explain(e.op, types, e.params, self.chip)
        if op is not None and not found:
            used = ", ".join(sorted({e.op.name for e in self.graph(rows=rows).eqns}))
            raise ConfigError(f"the decode step has no op {op!r}; it has {used}")
        return list(found.values())

    def resized(self, c: Any) -> "Model":
        """The model with another Config, and types for parameters, held as these are."""
        stored = stores(self.chip, self.config.weights, self.dtype)

        def type_of(spec: Any) -> Any:
            return stored(spec.role).types(spec.shape, self.dtype if spec.dtype is None else DTYPES[spec.dtype])

        return attrs.evolve(self, c=c, params=tree.map(type_of, self.definition.params(c)))

    def engine(self, **options: Any) -> Any:
        """An engine over this model; options are fields of EngineConfig and replace the model's."""
        from afl.run.engine import Engine
        from afl.run.unserved import refuse_unserved

        config = attrs.evolve(self.config, **options)
        refuse_unserved(attrs.evolve(self, config=config))
        return Engine(self, config)

    def generate(
        self,
        prompts: Sequence[Any] | str,
        *,
        chat: bool = False,
        options: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """Completions of `prompts` (texts, or lists of token ids), in order.

        sampling: fields of SamplingParams (max_tokens, temperature, ...).  options: fields of EngineConfig.
        """
        return list(self.stream(prompts, chat=chat, options=options, **sampling))

    def stream(self, prompts: Sequence[Any] | str, **arguments: Any) -> Iterator[Any]:
        """Like `generate`, yielding each completion when it is finished, in order of the prompts."""
        from afl.run.generate import complete

        return complete(self, [prompts] if isinstance(prompts, str) else prompts, **arguments)

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(map(stored_bytes, tree.leaves(self.params)))

    @property
    def parameters(self) -> int:
        """Number of parameters, however they are held."""
        return sum(math.prod(s.shape) for s in tree.leaves(self.definition.params(self.c)))

    def __repr__(self) -> str:
        return (
            f"Model({self.definition.name}, {self.parameters / 1e6:.1f} M parameters, {len(self.caches)} layers, "
            f"{str(self.dtype).removeprefix('torch.')}, chip {self.chip.name})"
        )
