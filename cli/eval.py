"""`afl eval`: what a precision costs in quality."""

import json as jsons
import sys
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from afl.chip import DTYPE_ALIASES
from afl.config import EngineConfig
from afl.errors import BadInput, ConfigError

from .early import engine_config
from .run import DEFAULT_MODEL, Chip, Dtype, Json, Model, Weights
from .terminal import busy, loading, scoring

HELP = """Measure how well a model predicts.

\b
  afl eval ppl --text FILE                                            perplexity of a text
  afl eval ppl --text FILE --weights int4 --compare float32 --layers  what four bits cost, and where
"""
CONTEXT = 2048      # attention to all of a long context costs more than it tells
_E = EngineConfig()


def ppl(
    text: Annotated[str, typer.Option("--text", metavar="FILE", help="The text, UTF-8; '-' is standard input.")],
    model: Model = DEFAULT_MODEL,
    weights: Weights = _E.weights,
    dtype: Dtype = _E.dtype,
    compare: Annotated[str | None, typer.Option(
        "--compare", metavar="NAME", show_default=False, help=
        "A second precision, a dtype or a value of --weights: also shows its perplexity, KL divergence from it, and "
        "how often both find the same token likeliest.")] = None,
    layers: Annotated[bool, typer.Option(
        "--layers", help="With --compare: relative error of the residual stream behind every block.")] = False,
    context: Annotated[int, typer.Option(
        "--context", metavar="N", min=0, help=f"Tokens of a window; 0: the model's longest, at most {CONTEXT}.")] = 0,
    stride: Annotated[int, typer.Option(
        "--stride", metavar="N", min=0, help="Tokens from window to window; 0: half a window.")] = 0,
    tokens: Annotated[int, typer.Option(
        "--tokens", metavar="N", min=0, help="Use the first N tokens of the text only; 0: all.")] = 0,
    chip: Chip = _E.chip,
    threads: Annotated[int, typer.Option(
        "--threads", metavar="N", help="Threads of CPU operators; 0: one per usable core.")] = _E.threads,
    json: Json = False,
) -> None:
    """Strided perplexity of a text: every token but the first is scored once, after at least context - stride others.

    \b
    Examples:
      afl eval ppl --text book.txt --context 512
      afl eval ppl --text book.txt --weights int8 --compare float32 --layers --json
    """
    if layers and compare is None:
        raise ConfigError("--layers compares two precisions; name the other one with --compare, such as float32")
    config = engine_config(dict(chip=chip, dtype=dtype, weights=weights, threads=threads))
    other = None if compare is None else _other(config, compare)
    content = _read(text)
    with busy(f"opening {model}"):
        from afl.run.load import outline
        from afl.run.ppl import layer_errors, score

        found = outline(model, config)
        if found.model.text is None:
            raise ConfigError(f"{model} has no tokenizer, so its perplexity of a text is not defined")
        ids = found.model.text.tokenizer.encode(content, special=True)
        ids = ids[:tokens] if tokens else ids
    context = context or min(found.model.c.max_len, CONTEXT)
    stride = stride or max(1, context // 2)
    with loading(f"reading {model}") as progress:
        m = found.read(progress)
    n = None
    if other is not None:
        with loading(f"reading {model} as {compare}") as progress:
            n = outline(model, other).read(progress)
    with scoring() as progress:
        got = score(m, ids, context, stride, n, progress)
        errors = layer_errors(m, n, ids, context) if layers else []
    result = {
        "model": model, "weights": weights, "dtype": str(m.dtype).removeprefix("torch."), "context": context,
        "stride": stride, **({"compared": compare} if compare else {}),
        **{k: v for k, v in attrs.asdict(got).items() if v is not None},
        **({"layers": [{"block": name, "relative_error": e} for name, e in errors]} if layers else {}),
    }
    if json:
        print(jsons.dumps(result))
        return
    _show(result)


def _show(r: dict[str, Any]) -> None:
    rows = [
        ("text", f"{r['tokens']} tokens scored, windows of {r['context']}, stride {r['stride']}"),
        (f"perplexity {r['weights']}", f"{r['ppl']:.4f}"),
    ]
    if "compared" in r:
        rows += [
            (f"perplexity {r['compared']}", f"{r['other_ppl']:.4f}   ({r['ppl'] / r['other_ppl'] - 1:+.2%})"),
            ("mean KL", f"{r['kl']:.3e} nats"),
            ("same likeliest", f"{r['top1']:.2%}"),
        ]
    rows += [(x["block"], f"{x['relative_error']:.3e}") for x in r.get("layers", ())]
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        print(f"{name:<{width}}{value}")


def _other(config: EngineConfig, name: str) -> EngineConfig:
    """The configuration that --compare names."""
    if DTYPE_ALIASES.get(name, name) in ("float32", "bfloat16", "float16"):
        return engine_config({**attrs.asdict(config), "dtype": name, "weights": "auto"})
    return engine_config({**attrs.asdict(config), "weights": name})


def _read(name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadInput(f"{name} is not UTF-8 text: byte {e.object[e.start]:#04x} at {e.start}") from None
    except (OSError, ValueError) as e:
        raise BadInput(f"cannot read {name}: {getattr(e, 'strerror', None) or e}") from None


COMMANDS = {"ppl": ppl}
