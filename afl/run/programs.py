"""The engine's programs: a model's step with sampling behind it, traced once per variant and valid for every size.

Two variants: "greedy" when no row of a step draws or edits, "sample" otherwise.  What they compute on greedy rows is
the same.  On a chip that captures graphs, buckets take the place of ranges and the engine pads to them.
"""

from typing import Any

import torch

from afl.ir.buckets import Ladder
from afl.ir.jit import Jitted, jit
from afl.models.batch import Batch, ModelState
from afl.ops.fusions import RULES
from afl.ops.sample import edit_logits, greedy, put_tokens, sample, take_tokens
from afl.run.memory import Pool
from afl.run.sampling import Edits, SampleRows
from afl.tree import evolve
from afl.types import TensorType

MOST_EDITS = 1 << 22  # entries of one step's sparse logit edits


def greedy_program(model: Any, pool: Pool) -> Jitted:
    """(params, state, batch) -> (state, token i32[r], logits f32[r, v])."""

    def step(params: Any, state: ModelState, batch: Batch) -> Any:
        state, logits = _forward(model, params, state, batch)
        token = greedy(logits)
        return _remember(state, batch, token), token, logits

    def abstract(z: dict[str, int]) -> Any:
        return _abstract(model, pool, z)

    return _jit(model, step, abstract, pool, {})


def sample_program(model: Any, pool: Pool) -> Jitted:
    """(params, state, batch, rows, edits) -> (state, token i32[r], logits f32[r, v]); logits are those before edits."""

    def step(params: Any, state: ModelState, batch: Batch, rows: SampleRows, edits: Edits) -> Any:
        state, logits = _forward(model, params, state, batch)
        changed = edit_logits(logits, edits.row, edits.token, edits.bias, edits.repeat, edits.minus)
        token = sample(changed, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.u)
        return _remember(state, batch, token), token, logits

    def abstract(z: dict[str, int]) -> Any:
        r, m = z["rows"], z["edits"]
        f32, i32, f64 = torch.float32, torch.int32, torch.float64
        rows = SampleRows(*(TensorType((r,), t) for t in (f32, i32, f32, f32, f64)))  # type: ignore[arg-type]
        edits = Edits(*(TensorType((m,), t) for t in (i32, i32, f32, f32, f32)))  # type: ignore[arg-type]
        return *_abstract(model, pool, z), rows, edits

    return _jit(model, step, abstract, pool, {"edits": (0, MOST_EDITS)})


def _forward(model: Any, params: Any, state: ModelState, batch: Batch) -> Any:
    token = take_tokens(batch.token, state.last_token)
    return model.definition.step(params, state, evolve(batch, token=token), c=model.c)


def _remember(state: ModelState, batch: Batch, token: Any) -> ModelState:
    return evolve(state, last_token=put_tokens(state.last_token, batch.state_row, token))


def _abstract(model: Any, pool: Pool, z: dict[str, int]) -> tuple[Any, ...]:
    state = model.state_types(pool.blocks, pool.block_tokens, model.config.max_seqs)
    return model.params, state, model.batch_types(z["tokens"], z["rows"], z["width"])


def _jit(model: Any, step: Any, abstract: Any, pool: Pool, more: dict[str, tuple[int, int]]) -> Jitted:
    c = model.config
    width = min(pool.blocks, -(-pool.max_model_len // pool.block_tokens))
    ranges = {"tokens": (1, c.max_step_tokens), "rows": (1, c.max_seqs), "width": (1, width), **more}
    ladder = None
    if model.chip.captures:
        steps = {n: _doubling(hi) for n, (_, hi) in ranges.items() if n != "edits"}
        steps["tokens"] = tuple(sorted({*steps["tokens"], c.max_seqs}))     # a decode step of all rows is a bucket
        ladder = Ladder(steps | {"width": (width,)} | ({"edits": (1, 256, 4096, 65536)} if more else {}))
    made = jit(
        step,
        chip=model.chip,
        donate=("state",),
        tags=("param", "state", *("batch",) * (3 if more else 1)),
        abstract=abstract,
        ranges=() if ladder else ranges,
        ladder=ladder,
        strict=c.strict,
        rules=RULES,
        references=c.references,
        checked=c.checked,
        eager=c.eager,
        name="sample_step" if more else "greedy_step",
    )
    return made.bind(model.params)


def _doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    steps = [1]
    while steps[-1] * 2 < most:
        steps.append(steps[-1] * 2)
    return tuple(dict.fromkeys([*steps, most]))
