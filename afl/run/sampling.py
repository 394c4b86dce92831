"""How a request wants its tokens chosen (`SamplingParams`), and the columns of a batch that follow (`SampleTable`)."""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from afl.errors import RequestError, nearest, violations
from afl.run.edits import RowEdits
from afl.run.philox import uniform
from afl.sched.loops import compiled
from afl.tree import struct


def _ids(values: Any) -> Any:
    """A tuple of plain values; what is no sequence stays for `validate` to name."""
    if isinstance(values, np.ndarray):
        return tuple(values.tolist())
    return tuple(values) if isinstance(values, list | tuple | set | frozenset | range) else values


def _words(values: Any) -> Any:
    values = _ids(values)
    return tuple(_ids(w) for w in values) if isinstance(values, tuple) else values


def _stops(values: Any) -> Any:
    return (values,) if isinstance(values, str) else _ids(values)


def _bias(values: Any) -> Any:
    return dict(values) if isinstance(values, Mapping) else values


@attrs.frozen
class SamplingParams:
    """What one request asks for.  The default is greedy.

    top_k <= 0, top_p 1 and min_p 0 are off.  seed None: one is drawn when the request is submitted.  logprobs: None is
    off, 0 the sampled token alone, -1 the whole vocabulary.  n samples use seed, seed + 1, ...
    Source of the penalties: Keskar et al. 2019 (arXiv:1909.05858) for repetition; frequency and presence as subtracted
    from logits by count of outputs.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_bias)
    bad_words_ids: tuple[tuple[int, ...], ...] = attrs.field(default=(), converter=_words)
    min_tokens: int = 0
    stop: tuple[str, ...] = attrs.field(default=(), converter=_stops)
    stop_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1

    @classmethod
    def of(cls, generation_config: Mapping[str, Any], **given: Any) -> "SamplingParams":
        """From a checkpoint's generation config and what the caller gives, which wins; None means not given.

        Greedy unless the config says do_sample or the caller gives a temperature, top_k, top_p or min_p.
        """
        known = [f.name for f in attrs.fields(cls)]
        bad = [
            f"unknown sampling option {k!r}" + (f"; did you mean {near[0]!r}?" if (near := nearest(k, known)) else "")
            for k in given if k not in known
        ]
        if bad:
            raise RequestError(violations("unknown sampling options", bad))
        given = {k: v for k, v in given.items() if v is not None}
        g = {k: v for k, v in generation_config.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        found: dict[str, Any] = {"max_tokens": g.get("max_new_tokens")}
        found |= {"repetition_penalty": g.get("repetition_penalty", 1.0)}
        draws = generation_config.get("do_sample") is True
        if draws:
            found |= {"temperature": g.get("temperature", 1.0), "top_k": g.get("top_k", 0)}
            found |= {"top_p": g.get("top_p", 1.0), "min_p": g.get("min_p", 0.0)}
        if "temperature" not in given and not draws and {"top_k", "top_p", "min_p"} & set(given):
            found["temperature"] = 1.0
        return cls(**{**found, **given})

    @property
    def plain(self) -> bool:
        """argmax of unedited logits."""
        return self.temperature < 1e-5 and not self.edits

    @property
    def edits(self) -> bool:
        """The logits are changed before a token is chosen."""
        return bool(self.penalised or self.logit_bias or self.bad_words_ids or self.min_tokens)

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def needs_host(self) -> bool:
        """The next step depends on tokens that the host must have seen."""
        return self.penalised or self.min_tokens > 0 or any(len(w) > 1 for w in self.bad_words_ids)

    def child(self, i: int) -> "SamplingParams":
        """The parameters of sample i of n."""
        return attrs.evolve(self, n=1, seed=None if self.seed is None else (self.seed + i) % (1 << 64))

    def validate(self, vocab: int, max_model_len: int) -> None:
        """Raise RequestError with everything that does not hold for a vocabulary of `vocab` ids."""
        rows: list[str] = []

        def number(name: str, low: float, high: float, above: bool = False) -> None:
            x = getattr(self, name)
            if not _is_number(x) or not low <= x <= high or (above and x == low):
                to = f" to {high:g}" if high < 1e30 else ""
                rows.append(f"{name} is {x!r}; must be a number {'above' if above else 'from'} {low:g}{to}")

        def whole(name: str, low: int, high: int) -> None:
            x = getattr(self, name)
            if not _is_int(x) or not low <= x <= high:
                rows.append(f"{name} is {x!r}; must be an integer from {low} to {high}")

        def ids(name: str, values: Any) -> None:
            if not isinstance(values, tuple):
                rows.append(f"{name} holds {values!r}; must be a list of token ids")
                return
            for id in values:
                if not _is_int(id) or not 0 <= id < vocab:
                    rows.append(f"{name} names token id {id!r}; ids go from 0 to {vocab - 1}")

        if self.max_tokens is not None:
            whole("max_tokens", 1, 1 << 30)
        if self.temperature != -1:                       # -1 is a customary way to say greedy
            number("temperature", 0.0, 100.0)
        whole("top_k", -1, 1 << 30)
        number("top_p", 0.0, 1.0, above=True)
        number("min_p", 0.0, 1.0)
        number("repetition_penalty", 0.0, 1e30, above=True)
        number("frequency_penalty", -2.0, 2.0)
        number("presence_penalty", -2.0, 2.0)
        most = self.max_tokens
        whole("min_tokens", 0, min(most, max_model_len) if most is not None and _is_int(most) else max_model_len)
        whole("n", 1, 4096)
        if self.logprobs is not None:
            whole("logprobs", -1, vocab)
        if self.seed is not None:
            whole("seed", 0, (1 << 64) - 1)
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                rows.append(f"{name} is {getattr(self, name)!r}; must be true or false")
        if isinstance(self.logit_bias, Mapping):
            ids("logit_bias", tuple(self.logit_bias))
            for id, bias in self.logit_bias.items():
                if not _is_number(bias) or not -100 <= bias <= 100:
                    rows.append(f"logit_bias of id {id} is {bias!r}; must be a number from -100 to 100")
        else:
            rows.append(f"logit_bias is {self.logit_bias!r}; must map token ids to numbers")
        ids("stop_ids", self.stop_ids)
        if isinstance(self.bad_words_ids, tuple):
            for word in self.bad_words_ids:
                rows += [] if word != () else ["bad_words_ids holds an empty word"]
                ids("bad_words_ids", word)
        else:
            rows.append(f"bad_words_ids is {self.bad_words_ids!r}; must be a list of lists of token ids")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            rows.append(f"stop is {self.stop!r}; must be strings that are not empty")
        if rows:
            raise RequestError(violations("the request does not hold", rows))


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


@struct
class SampleRows:
    """Columns of a batch for `afl.ops.sample.sample`."""

    temperature: Tensor        # f32 [r]
    top_k: Tensor              # i32 [r]
    top_p: Tensor              # f32 [r]
    min_p: Tensor              # f32 [r]
    u: Tensor                  # f64 [r]


@struct
class Edits:
    """Sparse edits for `afl.ops.sample.edit_logits`."""

    row: Tensor                # i32 [m], place in the batch; -1 = none
    token: Tensor              # i32 [m]
    bias: Tensor               # f32 [m]
    repeat: Tensor             # f32 [m]
    minus: Tensor              # f32 [m]


def leaves_of(rows: SampleRows, edits: Edits) -> tuple[Tensor, ...]:
    """The leaves of both in tree order, without walking them."""
    return (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.u,
            edits.row, edits.token, edits.bias, edits.repeat, edits.minus)


FILLS = (0, 0, 1, 0, 0.5, -1, 0, 0, 1, 0)      # what those leaves hold where a step is padded


_NO_EDITS = Edits(*(torch.empty(0, dtype=t) for t in (torch.int32, torch.int32, *3 * (torch.float32,))))


_NONE = np.zeros(0, bool)


def draw_columns(rows, emit, position, temperature, top_p, min_p, top_k, seed, floats, out_k, u):
    """Gather the columns of `rows`; temperature, top_p and min_p lie one behind the other.

    Rows that take no token are greedy.
    """
    r = len(rows)
    for i in range(r):
        row = rows[i]
        floats[i] = temperature[row] if emit[i] else np.float32(0)
        floats[r + i], floats[2 * r + i], out_k[i] = top_p[row], min_p[row], top_k[row]
        u[i] = uniform(seed[row], position[i], np.uint64(0))


class SampleTable:
    """Sampling parameters by device row, as numpy columns that a step indexes with its rows."""

    def __init__(self, rows: int) -> None:
        self.temperature, self.top_p, self.min_p = (np.zeros(rows, np.float32) for _ in range(3))
        self.top_k, self.seed = np.zeros(rows, np.int32), np.zeros(rows, np.uint64)
        self.special, self.edited, self.scored = (np.zeros(rows, bool) for _ in range(3))
        self.logprobs = np.zeros(rows, np.int64)
        self.edits: dict[int, RowEdits] = {}
        self.any_special = self.any_scored = False     # over all rows, so that a step need not look

    def set(self, row: int, p: SamplingParams, seed: int, prompt_tokens: int, stop_ids: tuple[int, ...]) -> None:
        """Row `row` now belongs to a request with these parameters; `stop_ids` are what min_tokens holds back."""
        self.temperature[row] = p.temperature if p.temperature >= 1e-5 else 0.0
        self.top_k[row], self.top_p[row], self.min_p[row] = min(p.top_k, 1 << 30), p.top_p, p.min_p
        self.seed[row] = seed
        self.special[row], self.edited[row] = not p.plain, p.edits
        self.scored[row], self.logprobs[row] = p.logprobs is not None, p.logprobs or 0
        self.any_special, self.any_scored = bool(self.special.any()), bool(self.scored.any())
        self.edits.pop(row, None)
        if p.edits:
            self.edits[row] = RowEdits(p, prompt_tokens, stop_ids)

    def pack(self, rows: np.ndarray, position: np.ndarray, emit: np.ndarray, tokens: Any) -> tuple[SampleRows, Edits]:
        """Columns and edits of a step.

        position: of the token to be sampled.  emit: rows that take a token; the others are greedy, the cheapest.
        tokens[row]: what the host knows of a row.
        """
        r = len(rows)
        floats, top_k, u = np.empty(3 * r, np.float32), np.empty(r, np.int32), np.empty(r)
        compiled(draw_columns)(
            rows, emit, position, self.temperature, self.top_p, self.min_p, self.top_k, self.seed, floats, top_k, u
        )
        temperature, top_p, min_p = torch.from_numpy(floats).split(r) if r else (torch.empty(0),) * 3
        edited = self.edited.take(rows) if self.edits else _NONE
        parts = []
        if np.count_nonzero(edited):
            for i in np.flatnonzero(edited & emit).tolist():
                row = int(rows[i])
                ids, bias, repeat, minus = self.edits[row].now(tokens[row])
                parts.append((np.full(len(ids), i, np.int32), ids, bias, repeat, minus))
        edits = Edits(*(torch.from_numpy(np.concatenate(p)) for p in zip(*parts, strict=True))) if parts else _NO_EDITS
        return SampleRows(temperature, torch.from_numpy(top_k), top_p, min_p, torch.from_numpy(u)), edits


def pad_rows(rows: SampleRows, edits: Edits, r: int, m: int) -> tuple[SampleRows, Edits]:
    """Padded to a bucket: greedy rows, and edits of row -1."""
    def to(x: Tensor, n: int, value: float) -> Tensor:
        return torch.cat([x, torch.full((n - len(x),), value, dtype=x.dtype)])

    s, e = rows, edits
    return (
        SampleRows(to(s.temperature, r, 0), to(s.top_k, r, 0), to(s.top_p, r, 1), to(s.min_p, r, 0), to(s.u, r, 0.5)),
        Edits(to(e.row, m, -1), to(e.token, m, 0), to(e.bias, m, 0), to(e.repeat, m, 1), to(e.minus, m, 0)),
    )
