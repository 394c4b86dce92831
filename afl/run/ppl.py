"""How well a model predicts a text: strided perplexity, and its distance from the same model at another precision.

Every token of a window is a row of its own whose context is the row before it: all rows share the window's block table,
and a step writes its keys before it attends.  So the step that serves requests also gives the logits of every token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from afl import tree
from afl.errors import BadInput, ConfigError, violations
from afl.ir.jit import jit
from afl.ir.op import Op
from afl.ir.trace import Eager, using
from afl.models.batch import Batch
from afl.ops.fusions import RULES
from afl.run.memory import tokens_of_block
from afl.run.pack import batch_of

CHUNK = 128         # tokens of a step: logits of more would weigh more than the model
Progress = Callable[[int, int], None]       # (tokens scored, tokens in all)


@attrs.frozen
class Window:
    """Tokens start .. end; those from `first` on are scored, each after all that the window has before it."""

    start: int
    first: int
    end: int


@attrs.frozen
class Score:
    """Perplexity over `tokens` tokens.  Against the other precision: its perplexity, the mean KL(other || this) in
    nats, and the share of tokens where both find the same one likeliest."""

    tokens: int
    ppl: float
    other_ppl: float | None = None
    kl: float | None = None
    top1: float | None = None


def windows(n: int, context: int, stride: int) -> Iterator[Window]:
    """Windows of `context` tokens, `stride` apart, that score every token of n but the first, once.

    >>> [(w.start, w.first, w.end) for w in windows(10, 6, 4)]
    [(0, 1, 6), (4, 6, 10)]
    """
    done = 1
    for start in range(0, n, stride):
        end = min(start + context, n)
        if end > done:
            yield Window(start, done, end)
        done = max(done, end)


class Reader:
    """One model with a cache for one window, filled a chunk at a time."""

    def __init__(self, model: Any, context: int, interpreter: Any = None) -> None:
        self.model, self.interpreter = model, interpreter
        self.size = tokens_of_block(model.caches, model.chip, model.config.block_tokens)
        self.width = -(-context // self.size)
        self.state = model.init_state(self.width, self.size, 1)
        self.step = jit(
            model.step, chip=model.chip, donate=("state",), tags=("param", "state", "batch"), rules=RULES,
            ranges=({"tokens": (1, CHUNK)},), name="score_step",
            abstract=lambda z: (
                model.params, model.state_types(self.width, self.size, 1),
                model.batch_types(z["tokens"], z["tokens"], self.width),
            ),
        ).bind(model.params)

    def logits(self, ids: np.ndarray, at: int) -> Tensor:
        """f32 [len(ids), v]: what follows each token; they stand at `at`, ... of the window, whose start is cached."""
        batch = self._batch(ids, at)
        with torch.inference_mode():
            if self.interpreter is not None:
                with using(self.interpreter):
                    self.state, out = self.model.step(self.model.params, self.state, batch)
                return out
            *leaves, out = self.step.program(tokens=len(ids))(*tree.leaves(self.state), *tree.leaves(batch))
        self.state = tree.unflatten(tree.flatten(self.state)[1], leaves)
        return out

    def _batch(self, ids: np.ndarray, at: int) -> Batch:
        n = len(ids)
        position = np.arange(at, at + n)
        table = np.tile(np.arange(1, self.width + 1), (n, 1))
        slot = table[0][position // self.size] * self.size + position % self.size
        return batch_of(ids, position, slot, np.arange(n + 1), position + 1, table, np.full(n, -1))


def score(
    model: Any, ids: Sequence[int], context: int, stride: int, other: Any = None, progress: Progress | None = None
) -> Score:
    """Perplexity of token ids, and the distance from `other`, the same model at another precision."""
    text = _checked(model, ids, context, stride)
    readers = [Reader(m, context) for m in (model, other) if m is not None]
    nll, kl, same, tokens = [0.0, 0.0], 0.0, 0, 0
    for w in windows(len(text), context, stride):
        for at in range(w.start, w.end - 1, CHUNK):
            end = min(at + CHUNK, w.end - 1)                # the last token predicts nothing inside of the window
            first = max(w.first - 1, at)
            logs = [r.logits(text[at:end], at - w.start) for r in readers]
            if first >= end:
                continue
            logs = [x[first - at :].log_softmax(-1) for x in logs]
            want = torch.from_numpy(text[first + 1 : end + 1])
            for i, x in enumerate(logs):
                nll[i] -= float(x.gather(1, want[:, None]).double().sum())
            if other is not None:
                q, p = logs
                kl += float((p.exp() * (p - q)).sum(-1).double().sum())
                same += int((p.argmax(-1) == q.argmax(-1)).sum())
            tokens += end - first
            if progress is not None:
                progress(tokens, len(text) - 1)
    ppl, second = (_exp(x / tokens) for x in nll)
    return Score(tokens, ppl) if other is None else Score(tokens, ppl, second, max(kl / tokens, 0.0), same / tokens)


def layer_errors(model: Any, other: Any, ids: Sequence[int], context: int) -> list[tuple[str, float]]:
    """Relative error |this - other| / |other| of the residual stream, over the tokens of the first window, per block.

    Both models run op by op; each sum of a block's output with the stream is compared.
    Raises ConfigError for a model that does not add and norm in one op.
    """
    text = _checked(model, ids, context, 1)[:context]
    kept: list[Tensor] = []
    sums: list[tuple[float, float]] = []
    taps = _Tap(other.chip, kept.append), _Tap(model.chip, lambda x: sums.append(_distance(x, kept[len(sums)])))
    readers = [Reader(m, context, tap) for m, tap in zip((other, model), taps, strict=True)]
    totals = np.zeros((0, 2))
    for at in range(0, len(text), CHUNK):
        for r in readers:
            r.logits(text[at : at + CHUNK], at)
        totals = np.array(sums) + (totals if len(totals) else 0.0)
        kept.clear()
        sums.clear()
    if not len(totals):
        raise ConfigError(f"{model.definition.name} has no op add_rms_norm, at whose sums layers are compared")
    blocks = len(totals) // len(model.caches)
    names = ("attention", "mlp") if blocks == 2 else tuple(f"block {i}" for i in range(blocks))
    return [(f"layer {i // blocks} {names[i % blocks]}", math.sqrt(d / n) if n else 0.0)
            for i, (d, n) in enumerate(totals.tolist())]


class _Tap(Eager):
    """Runs op by op and hands on every sum of the residual stream."""

    def __init__(self, chip: Any, take: Callable[[Tensor], None]) -> None:
        super().__init__(chip)
        self.take = take

    def run(self, op: Op, k: Any, args: tuple[Any, ...], types: Any, values: Any) -> Any:
        out = super().run(op, k, args, types, values)
        if op.name == "add_rms_norm":
            self.take(out[1].float().clone())
        return out


def _distance(x: Tensor, y: Tensor) -> tuple[float, float]:
    return float((x - y).double().square().sum()), float(y.double().square().sum())


def _checked(model: Any, ids: Sequence[int], context: int, stride: int) -> np.ndarray:
    rows = []
    if len(ids) < 2:
        rows.append(f"the text has {len(ids)} tokens; at least 2 are needed, since the first one is only read")
    if not 2 <= context <= model.c.max_len:
        rows.append(f"context is {context}, must be 2 to {model.c.max_len}, the model's longest sequence")
    if not 1 <= stride < context:
        rows.append(f"stride is {stride}, must be 1 to {context - 1}: below the context, or tokens would have none")
    if rows:
        raise BadInput(violations("options that do not hold", rows))
    return np.asarray(ids, np.int64)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
