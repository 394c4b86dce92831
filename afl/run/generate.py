"""From prompts to completions: encode, submit, step, detokenise, stop.  What `Model.generate` and `afl run` share."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from afl import config as configs
from afl.errors import AflError, ConfigError, RequestError
from afl.run.engine import Engine
from afl.run.logprobs import TokenLogprobs
from afl.run.sampling import SamplingParams
from afl.run.text import TextStream
from afl.sched import REASONS

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages
_STOP = REASONS.index("stop")
_RATES = ("ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "total_s")


@attrs.frozen
class Completion:
    """One finished answer.  token_ids includes the stop token; text does not, unless include_stop was asked for."""

    index: int  # of the prompt
    sample: int  # 0 .. n-1
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None  # the stop id or stop string, None for EOS
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stats: Mapping[str, float] = attrs.field(factory=dict)
    error: str | None = None  # why the request was refused


@attrs.frozen
class Piece:
    """Text that became final, and the completion once it is complete."""

    index: int
    sample: int
    text: str
    done: Completion | None = None


@attrs.define
class _Job:
    index: int
    sample: int
    prompt_tokens: int
    params: SamplingParams
    stream: TextStream | None
    started: float
    first: float = 0.0
    last: float = 0.0
    cached: int = 0
    text: list[str] = attrs.field(factory=list)
    ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)


def encode(model: Any, prompt: Prompt, *, chat: bool = False, system: str | None = None) -> list[int]:
    """Token ids of a prompt.  Chat renders the model's template, which writes the special tokens itself.

    Raises RequestError for an empty prompt, ConfigError when the model lacks the text layer that is asked for.
    """
    if not isinstance(prompt, str) and all(isinstance(t, int) for t in prompt):
        return list(prompt)  # type: ignore[arg-type]
    if model.text is None:
        raise ConfigError("this model has no tokenizer; give prompts as lists of token ids")
    messages = None if isinstance(prompt, str) else list(prompt)
    if isinstance(prompt, str) and not prompt:
        raise RequestError("the prompt is empty: a model continues at least one token")
    if messages is None and chat:
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
    if messages is not None:
        if model.text.chat is None:
            raise ConfigError("this checkpoint has no chat template; pass plain text (afl run --no-chat)")
        return model.text.chat.encode(model.text.tokenizer, messages, now=datetime.now())
    ids = model.text.tokenizer.encode(prompt, special=True)
    if not ids:
        raise RequestError("the prompt is empty after encoding: a model continues at least one token")
    return ids


def bad_words(model: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of texts that must not occur, each as the start of a text and as a word after a space."""
    if model.text is None:
        raise ConfigError("this model has no tokenizer; give bad words as bad_words_ids")
    if not all(w.strip() for w in words):
        raise ConfigError("a bad word is empty")
    forms = [form for w in words for form in dict.fromkeys((w, w.lstrip(), " " + w.lstrip()))]
    return tuple(dict.fromkeys(tuple(model.text.tokenizer.encode(form, special=False)) for form in forms))


def stream(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, urgency: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Piece]:
    """Serve prompts of token ids as one batch, `params.n` samples each, yielding text as it becomes final.

    urgency: per prompt `priority` and `deadline` as `Engine.submit` takes them; empty: none has any.

    A request that is refused yields a Piece whose completion carries the error; the others go on.  Closing the
    iterator aborts what is left.
    """
    jobs: dict[str, _Job] = {}
    whole = True  # a step that raised leaves the engine between two states, and stepping on would hide the reason
    try:
        yield from _submit(engine, prompts, params, jobs, urgency or [{}] * len(prompts))
        while jobs:
            whole = False
            result = engine.step()
            whole = True
            yield from _deliver(engine, result, jobs)
            if jobs and not engine.busy:
                raise AflError(f"the scheduler lost {len(jobs)} requests: {', '.join(jobs)}")  # our own invariant
    finally:
        if whole:
            for id in jobs:
                engine.abort(id)
            while engine.busy:
                engine.step()


def _submit(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, jobs: dict[str, _Job],
    urgency: Sequence[Mapping[str, Any]],
) -> Iterator[Piece]:
    """Queue all samples of all prompts in `jobs`; yields the refused ones."""
    text = engine.model.text
    for index, ids in enumerate(prompts):
        for sample in range(params.n):
            own = params.child(sample)
            made = (
                None
                if text is None
                else TextStream(text.tokenizer, stop=own.stop, include_stop=own.include_stop, min_tokens=own.min_tokens)
            )
            job = _Job(index, sample, len(ids), own, made, time.perf_counter())
            try:
                jobs[engine.submit(ids, own, **urgency[index])] = job
            except RequestError as e:
                yield Piece(index, sample, "", _refused(job, str(e)))


def _deliver(engine: Engine, result: Any, jobs: dict[str, _Job]) -> Iterator[Piece]:
    now = time.perf_counter()
    for id, message in result.outputs.refused:
        job = jobs.pop(id, None)
        if job is not None:
            yield Piece(job.index, job.sample, "", _refused(job, message))
    out = result.outputs
    for id, token, finish, reason in zip(
        out.ids, out.tokens.tolist(), out.finish.tolist(), out.stop_reason.tolist(), strict=True
    ):
        job = jobs.get(id)
        if job is None:
            continue
        new = ""
        if token >= 0:
            job.first = job.first or now
            job.last = now
            job.cached = engine.cached.get(id, job.cached)
            job.ids.append(token)
            if id in result.logprobs:
                job.logprobs.append(result.logprobs[id])
            if job.stream is not None and finish != _STOP:
                new = job.stream.push([token])
        stopped = job.stream.stopped if job.stream is not None else None
        if stopped is not None:
            if not finish:
                engine.abort(id, "stop")
            finish, why = _STOP, stopped
        else:
            why = reason if reason >= 0 else None
        if finish and job.stream is not None and stopped is None:
            new += job.stream.end(stop_id=token if finish == _STOP else None)
            if job.stream.stopped is not None:  # the flushed end of a character completed a stop string
                finish, why = _STOP, job.stream.stopped
        job.text.append(new)
        if finish:
            del jobs[id]
            yield Piece(job.index, job.sample, new, _completion(job, REASONS[finish], why))
        elif new:
            yield Piece(job.index, job.sample, new)


def _completion(job: _Job, reason: str, why: Any) -> Completion:
    n, wait, rest = len(job.ids), job.first - job.started, job.last - job.first
    stats = (
        {
            "ttft_s": wait,
            "prefill_tokens_per_s": job.prompt_tokens / wait if wait > 0 else 0.0,
            "decode_tokens_per_s": (n - 1) / rest if rest > 0 else 0.0,
            "total_s": job.last - job.started,
            "cached_tokens": job.cached,
        }
        if n
        else dict.fromkeys(_RATES, 0.0) | {"cached_tokens": 0}
    )
    logprobs = None if job.params.logprobs is None else tuple(job.logprobs)
    return Completion(
        job.index, job.sample, "".join(job.text), tuple(job.ids), job.prompt_tokens, reason, why, logprobs, stats
    )


def _refused(job: _Job, message: str) -> Completion:
    return Completion(job.index, job.sample, "", (), job.prompt_tokens, "error", error=message)


def complete(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    chat: bool = False,
    system: str | None = None,
    options: dict[str, Any] | None = None,
    params: SamplingParams | None = None,
    **sampling: Any,
) -> Iterator[Completion]:
    """Completions in order of the prompts (and samples), each as soon as it and all before it are finished.

    Raises RequestError if a request is refused.
    """
    config = configs.EngineConfig.of({**attrs.asdict(model.config), **(options or {})})
    made = params or SamplingParams.of(model.generation_config, **sampling)
    ids = [encode(model, p, chat=chat, system=system) for p in prompts]
    engine = Engine(model, config)
    done: dict[tuple[int, int], Completion] = {}
    order = [(i, s) for i in range(len(ids)) for s in range(made.n)]
    try:
        at = 0
        for piece in stream(engine, ids, made):
            if piece.done is None:
                continue
            if piece.done.error is not None:
                raise RequestError(f"prompt {piece.index}: {piece.done.error}")
            done[piece.index, piece.sample] = piece.done
            while at < len(order) and order[at] in done:
                yield done.pop(order[at])
                at += 1
    finally:
        engine.close()
