"""`afl run`: prompts in, answers out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from afl import chip as chips
from afl.chip import F
from afl.config import EngineConfig
from afl.errors import BadInput, ConfigError, violations
from afl.models.locate import ALIASES

from .early import engine_config, policies
from .prompts import Asked, gather, numbers, refusals
from .terminal import Interrupts, busy, counting, loading, say

DEFAULT_MODEL = "smollm2"
MAX_TOKENS = 256
_E = EngineConfig()

Model = Annotated[str, typer.Option(
    "--model", "-m", metavar="PATH|NAME", rich_help_panel="Model",
    help=f"A Hugging Face folder, a .gguf file, an alias ({', '.join(ALIASES)}), or the name of a model in the local "
         "Hugging Face cache. Nothing is downloaded.")]
Chip = Annotated[str, typer.Option("--chip", rich_help_panel="Engine", metavar="NAME", help=
    f"What to run on: {', '.join(chips.names())}.")]
Dtype = Annotated[str, typer.Option("--dtype", rich_help_panel="Engine", metavar="NAME", help=
    "Compute dtype: float32, bfloat16, float16; auto is the chip's first.")]
Json = Annotated[bool, typer.Option("--json", rich_help_panel="Output", help=
    "Machine-readable output, and nothing else on stdout.")]


def _engine(help: str, *names: str, metavar: str | None = "N", **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Engine", **more)


def _sampling(help: str, *names: str, metavar: str | None = "N", **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Sampling", show_default=False, **more)


Weights = Annotated[str, _engine(
    "How matrices are held: a dtype, int8, int8-channel, int4, int4-sym; with int8-dynamic and int4-dynamic products "
    "also round what they multiply; auto: the compute dtype.", metavar="NAME")]
MaxModelLen = Annotated[int, _engine("Longest sequence, prompt included; 0: what the model and the cache allow.")]
MaxSeqs = Annotated[int, _engine("Most requests that run at a time; never more than there are answers.")]
MaxStepTokens = Annotated[int, _engine(
    "Most tokens that one step computes; longer prompts are cut into chunks.", "--max-step-tokens", "--token-budget")]
KvBlocks = Annotated[int, _engine("Blocks of the key-value cache; 0: a quarter of the free memory at most.")]
BlockTokens = Annotated[int, _engine("Tokens per cache block; 0: what the chip prefers.")]

SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_ids", "logprobs", "ignore_eos",
    "min_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "bad_words",
    "include_stop",
)


def run(
    prompt: Annotated[str | None, typer.Argument(
        metavar="PROMPT", help="The prompt; '-' or nothing reads standard input.", show_default=False)] = None,
    model: Model = DEFAULT_MODEL,
    file: Annotated[str | None, typer.Option(
        "--file", "-f", metavar="FILE", rich_help_panel="Model", show_default=False, help=
        "Run every line of a file as one batch: a text per line, or JSON lines with \"prompt\" or \"messages\", and "
        "\"priority\" (smaller is sooner) or \"deadline\" (seconds) if a policy asks for them. '-' is standard input."
    )] = None,
    prompt_ids: Annotated[str | None, typer.Option(
        metavar="1,2,3", rich_help_panel="Model", show_default=False, help="The prompt as token ids.")] = None,
    system: Annotated[str | None, typer.Option(
        rich_help_panel="Model", show_default=False, help="System message of the chat.")] = None,
    no_chat: Annotated[bool, typer.Option(
        "--no-chat", rich_help_panel="Model", help="Continue the plain text; do not use the chat template.")] = False,
    max_tokens: Annotated[int | None, _sampling(
        f"Most tokens of an answer; 0: until the model ends it or the context is full. Default: {MAX_TOKENS}.",
        min=0)] = None,
    temperature: Annotated[float | None, _sampling(
        "0 takes the likeliest token. Default: what generation_config.json says, else 0.", metavar="X")] = None,
    top_p: Annotated[float | None, _sampling(
        "Draw among the likeliest tokens that together have this probability.", metavar="X")] = None,
    top_k: Annotated[int | None, _sampling("Draw among this many likeliest tokens; 0: all.")] = None,
    min_p: Annotated[float | None, _sampling(
        "Draw among tokens at least this likely, relative to the likeliest.", metavar="X")] = None,
    seed: Annotated[int | None, _sampling(
        "Same seed, same answer, whatever else runs; sample i uses seed + i.")] = None,
    n: Annotated[int | None, _sampling("Independent answers to each prompt.", "--n", "-n")] = None,
    stop: Annotated[list[str] | None, _sampling(
        "End at this text and leave it out; repeat for several.", metavar="TEXT")] = None,
    stop_ids: Annotated[str | None, _sampling("End at these token ids.", metavar="1,2,3")] = None,
    include_stop: Annotated[bool, _sampling(
        "Show the stop text or stop token that ended the answer.", "--include-stop", metavar=None)] = False,
    ignore_eos: Annotated[bool, _sampling(
        "Go on after the end-of-sequence token, up to --max-tokens.", "--ignore-eos", metavar=None)] = False,
    min_tokens: Annotated[int | None, _sampling("No end before this many tokens.")] = None,
    repetition_penalty: Annotated[float | None, _sampling(
        "Divides the logits of tokens that occurred; 1: off.", metavar="X")] = None,
    frequency_penalty: Annotated[float | None, _sampling(
        "Subtracted once per occurrence in the answer; 0: off.", metavar="X")] = None,
    presence_penalty: Annotated[float | None, _sampling(
        "Subtracted if it occurred in the answer; 0: off.", metavar="X")] = None,
    logit_bias: Annotated[list[str] | None, _sampling(
        "Added to a token's logit; repeat for several.", metavar="ID:VALUE")] = None,
    bad_words: Annotated[list[str] | None, _sampling(
        "Never write this text in its usual tokens, at the start or after a space; repeat for several.",
        metavar="TEXT")] = None,
    logprobs: Annotated[int | None, _sampling(
        "Log-probability of each token, with this many alternatives (0: none).")] = None,
    chip: Chip = _E.chip,
    dtype: Dtype = _E.dtype,
    weights: Weights = _E.weights,
    max_model_len: MaxModelLen = _E.max_model_len,
    max_seqs: MaxSeqs = _E.max_seqs,
    max_step_tokens: MaxStepTokens = _E.max_step_tokens,
    kv_blocks: KvBlocks = _E.kv_blocks,
    block_tokens: BlockTokens = _E.block_tokens,
    eager: Annotated[bool, _engine("Trace nothing: run op by op.", "--eager", metavar=None)] = _E.eager,
    checked: Annotated[bool, _engine(
        "Check every op for index ranges, NaN and result types (slow).", "--checked", metavar=None)] = _E.checked,
    references: Annotated[bool, _engine(
        "Run the reference body of every op (slow).", "--references", metavar=None)] = _E.references,
    strict: Annotated[bool, _engine(
        "A trace that was not declared is an error.", "--strict/--no-strict", metavar=None)] = _E.strict,
    depth: Annotated[int, _engine("Steps in flight: 1, or 2 to schedule one while another runs.")] = _E.depth,
    threads: Annotated[int, _engine("Threads of CPU operators; 0: one per usable core.")] = _E.threads,
    policy: Annotated[str, _engine(
        f"Scheduler policy: a name or names joined by + ({', '.join(policies())}), or a .json file.",
        metavar="NAME|FILE")] = _E.policy,
    prefix_cache: Annotated[bool, _engine(
        "Reuse what the cache still holds of earlier prompts.", "--prefix-cache/--no-prefix-cache", metavar=None)]
    = _E.prefix_cache,
    graphs: Annotated[str, _engine(
        "Replay decode steps from captured graphs: auto (on a device), on (also emulated on a host), off.",
        metavar="auto|on|off")] = _E.graphs,
    log: Annotated[str | None, _engine(
        "Write the engine's event log to this file.", metavar="FILE", show_default=False)] = _E.log,
    json: Json = False,
    stats: Annotated[bool, typer.Option(
        "--stats", rich_help_panel="Output", help="Times, rates, programs, cache and memory, on stderr.")] = False,
    profile: Annotated[str | None, typer.Option(
        "--profile", metavar="FILE", rich_help_panel="Output", show_default=False, help=
        "Write where the time went, for Perfetto or chrome://tracing; a table of the dearest equations on stderr.")
    ] = None,
) -> None:
    """Answer prompts.

    The answer streams to stdout; everything else goes to stderr. On a terminal, control characters in an answer are
    shown as escapes such as \\x1b; a pipe gets them unchanged. Status: 0 all answered, 2 bad input or a prompt
    refused (the others are still answered), 130 Ctrl-C.

    \b
    Examples:
      afl run "What is the capital of France?"
      afl run --no-chat --max-tokens 8 "The capital of France is"
      afl run --temperature 0.8 --top-p 0.95 --seed 7 --n 3 "Name a colour."
      cat article.txt | afl run --system "Summarise in one sentence."
      afl run --file prompts.jsonl --json > answers.jsonl
      afl run --model ./Qwen3-0.6B --dtype bfloat16 --stats "Hello"
    """
    given = dict(locals())
    config = engine_config({f.name: given[f.name] for f in attrs.fields(EngineConfig)})
    sampling = _sampling_options({name: given[name] for name in SAMPLING})
    _check_profile(profile, config)
    asked = gather(prompt, file, prompt_ids)
    if all(a.error for a in asked):
        raise BadInput(refusals(asked))
    status = _serve(asked, model, config, sampling, system, not no_chat, json, stats, profile)
    if status:
        raise typer.Exit(status)


def _check_profile(path: str | None, config: EngineConfig) -> None:
    """Raise BadInput if a profile cannot be made, or cannot be written there."""
    rows = []
    if path is not None and config.eager:
        rows.append("--profile is about programs, and --eager traces none; leave one of the two out")
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        rows.append(f"--profile {path} cannot be written: it is a folder, or lies in none")
    if rows:
        raise BadInput(violations("options that do not hold", rows))


def _sampling_options(given: dict[str, Any]) -> dict[str, Any]:
    """The sampling flags that were given, in the form of SamplingParams."""
    rows = []
    found = {k: v for k, v in given.items() if v is not None and v is not False and v != []}
    if "stop_ids" in found:
        found["stop_ids"] = tuple(numbers(found["stop_ids"], "--stop-ids"))
    if "stop" in found:
        found["stop"] = tuple(found["stop"])
    if "logit_bias" in found:
        bias: dict[int, float] = {}
        for text in found["logit_bias"]:
            id, _, value = text.partition(":")
            try:
                bias[int(id)] = float(value)
            except ValueError:
                rows.append(f"--logit-bias takes ID:VALUE, such as 50:-2.5; got {text!r}")
        found["logit_bias"] = bias
    if rows:
        raise ConfigError(violations("options that do not hold", rows))
    return found


def _serve(
    asked: Sequence[Asked], name: str, config: EngineConfig, sampling: dict[str, Any], system: str | None, chat: bool,
    json: bool, stats: bool, profile: str | None = None,
) -> int:
    """Load, run, print; returns the exit status."""
    from .answers import Lines, Plain, Streaming, Watched, statistics

    with busy(f"opening {name}"):        # torch and the tokenizer take a second or two
        from afl.run.generate import bad_words, encode, stream
        from afl.run.load import outline
        from afl.run.sampling import SamplingParams
        from afl.run.unserved import refuse_unserved

        found = outline(name, config)
    m = found.model
    wishes = {k: v for k, v in sampling.items() if (k, v) != ("max_tokens", 0)}
    if "bad_words" in wishes:
        wishes["bad_words_ids"] = bad_words(m, wishes.pop("bad_words"))
    params = SamplingParams.of(m.generation_config, **wishes)
    limited = "max_tokens" in sampling or params.max_tokens is not None
    if sampling.get("max_tokens") == 0:
        params = attrs.evolve(params, max_tokens=None)
    elif not limited:
        params = attrs.evolve(params, max_tokens=MAX_TOKENS)
    params.validate(m.c.v, config.max_model_len or m.c.max_len)
    template = m.text is not None and m.text.chat is not None
    if chat and m.text is not None and not template:
        if system is not None:
            raise ConfigError("--system needs a chat template, which this checkpoint lacks; put it into the prompt")
        say("this checkpoint has no chat template: prompts are continued as plain text", "note")

    ids: list[list[int]] = []
    places: list[int] = []                  # index into `asked` of each encoded prompt
    refused: dict[int, str] = {}
    for i, a in enumerate(asked):
        try:
            if a.error is not None:
                raise BadInput(a.error)
            if a.value == []:
                raise BadInput("the prompt is empty: a model continues at least one token")
            ids.append(encode(m, _with_system(a.value, system), chat=chat and template, system=system))
            places.append(i)
        except BadInput as e:
            refused[i] = str(e)
    if not ids:
        raise BadInput(refusals([Asked(asked[i].where, None, why) for i, why in refused.items()]))

    refuse_unserved(m)
    with loading(f"reading {name}") as progress:
        m = found.read(progress)
    if F.NPU in m.chip.features:
        say(f"chip {m.chip.name} is emulated on this host: right, but slow", "note")
    for notice in m.notices:
        say(notice, "note")
    # rows that cannot be used would only enlarge the cache
    config = attrs.evolve(config, max_seqs=min(config.max_seqs, len(ids) * params.n))
    engine: Any = _engine_of(profile, m, config)
    urgency = [asked[i].urgency for i in places]
    for wanted in sorted(engine.needs & {"priority", "deadline"}):
        if not any(wanted in u for u in urgency):
            say(f"policy {config.policy}: no prompt has a {wanted}, so all are alike to it; JSON lines can have one, "
                f'{{"prompt": "...", "{wanted}": 1}}', "note")
    several = len(asked) > 1 or params.n > 1
    printer = (Lines if json else Plain if several else Streaming)(asked, params.n, several)
    for i, why in refused.items():
        _refuse(printer, asked, i, 0, why)
    interrupts, done = Interrupts(), []
    watched = Watched(engine, interrupts)
    try:
        with interrupts.waiting(), counting(len(ids) * params.n) as count:
            for piece in stream(watched, ids, params, urgency):     # type: ignore[arg-type]
                place = places[piece.index]
                if piece.done is not None:
                    count()
                if piece.done is None or piece.done.error is None:
                    printer.take(place, piece)
                    done += [piece.done] if piece.done is not None else []
                else:
                    refused[place] = piece.done.error
                    if piece.sample == 0:
                        hint = _pool_hint(engine, m, config)
                        _refuse(printer, asked, place, params.n, piece.done.error + hint)
            printer.close()
    finally:
        engine.close()
    cut = sum(c.finish_reason == "length" and len(c.token_ids) == params.max_tokens for c in done)
    if cut and not limited:
        say(f"{'the answer was' if len(done) == 1 else f'{cut} answers were'} cut at {MAX_TOKENS} tokens; "
            "--max-tokens N allows more, 0 up to the whole context", "note")
    if stats:
        say(statistics(watched, done))
    if profile is not None:
        engine.profile.write(profile)
        say(engine.profile.table())
    if interrupts.pressed:
        say("interrupted")
        return 130
    return 2 if refused else 0


def _engine_of(profile: str | None, model: Any, config: EngineConfig) -> Any:
    if profile is None:
        from afl.run.engine import Engine

        return Engine(model, config)
    from afl.run.profile import ProfiledEngine

    return ProfiledEngine(model, config)


def _with_system(value: Any, system: str | None) -> Any:
    """Chat messages of a file get the system message unless they bring their own."""
    if system is None or not isinstance(value, list) or not isinstance(value[0], dict) or value[0]["role"] == "system":
        return value
    return [{"role": "system", "content": system}, *value]


def _refuse(printer: Any, asked: Sequence[Asked], place: int, samples: int, why: str) -> None:
    say(f"{asked[place].where}: {why}" if len(asked) > 1 else why, "error")
    printer.refuse(place, why)


def _pool_hint(engine: Any, m: Any, config: EngineConfig) -> str:
    """Why the limit is what it is, when the cache and not the model sets it."""
    pool = engine.pool
    if pool.max_model_len >= (config.max_model_len or m.c.max_len):
        return ""
    return f" (the cache holds {pool.blocks} blocks of {pool.block_tokens} tokens: {pool.tokens} tokens, by {pool.why})"
