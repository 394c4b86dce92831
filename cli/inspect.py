"""`afl inspect`: what a model is, what its step computes, which kernels serve it, what it weighs.  Reads no weights."""

import enum
import json as jsons
from typing import Annotated, Any

import attrs
import typer

from afl.config import EngineConfig
from afl.errors import ConfigError, unknown

from .early import engine_config
from .run import (
    DEFAULT_MODEL,
    BlockTokens,
    Chip,
    Dtype,
    Json,
    KvBlocks,
    MaxModelLen,
    MaxSeqs,
    MaxStepTokens,
    Model,
    Weights,
)
from .terminal import busy, write

HELP = """Look at a model without reading its weights.

\b
  afl inspect model      sizes, tokenizer, stop ids, what is left out and why
  afl inspect graph      the typed program of one step; --program for the generated Python
  afl inspect kernels    which kernel serves each op, and why not the others
  afl inspect memory     bytes of parameters, cache and temporaries
"""
_E = EngineConfig()


class Phase(enum.StrEnum):
    decode = "decode"
    prefill = "prefill"


class Format(enum.StrEnum):
    text = "text"
    dot = "dot"
    html = "html"


Rows = Annotated[int, typer.Option("--rows", min=1, max=4096, help="Requests in the step.")]
Phases = Annotated[Phase, typer.Option("--phase", help="decode has one token per row, prefill many.")]


def _outline(name: str, options: dict[str, Any]) -> Any:
    config = engine_config(options)
    with busy(f"opening {name}"):
        from afl.run.load import outline

        return outline(name, config)


def _program(model: Any, phase: str, rows: int, tokens: int) -> Any:
    """The step as it is planned for the chip: rewritten, its state donated."""
    from afl.ir.passes import drop_unit_collectives
    from afl.ir.program import compile_graph
    from afl.ops.fusions import RULES

    g = drop_unit_collectives(model.graph(phase, rows, tokens), {})
    return compile_graph(g, model.chip, donate=("state",), rules=RULES, name=phase)


def _rewritten(model: Any, phase: str, rows: int, tokens: int) -> Any:
    """The step's graph after the chip's fusions."""
    from afl.ir.passes import cse, dce, drop_unit_collectives, usable
    from afl.ir.rewrite import rewrite
    from afl.ops.fusions import RULES

    g = drop_unit_collectives(model.graph(phase, rows, tokens), {})
    return dce(cse(rewrite(g, usable(RULES, model.chip), model.chip)))


def graph(
    model: Model = DEFAULT_MODEL, chip: Chip = _E.chip, dtype: Dtype = _E.dtype, weights: Weights = _E.weights,
    rows: Rows = 4,
    phase: Phases = Phase.decode,
    tokens: Annotated[int, typer.Option(
        "--tokens", min=0, max=1 << 20, help="Tokens of a prefill step; 0: 16 per row.")] = 0,
    format: Annotated[Format, typer.Option(
        "--format", help="text; dot for graphviz; html for a browser.")] = Format.text,
    rewritten: Annotated[bool, typer.Option("--rewritten", help="The graph after the chip's fusions.")] = False,
    program: Annotated[bool, typer.Option("--program", help="The generated Python of the rewritten graph.")] = False,
) -> None:
    """Show the program that one step of a model is.

    \b
    Examples:
      afl inspect graph --rows 4
      afl inspect graph --program
      afl inspect graph --format dot | dot -Tsvg > step.svg
      afl inspect graph --phase prefill --format html > step.html
    """
    if program and format is not Format.text:
        raise ConfigError("--program is Python text; use --rewritten for the same graph as dot or html")
    m = _outline(model, {"chip": chip, "dtype": dtype, "weights": weights}).model
    if program:
        write(_program(m, phase, rows, tokens).source)
        return
    from afl.ir.graph import show, show_dot, show_html

    g = _rewritten(m, phase, rows, tokens) if rewritten else m.graph(phase, rows, tokens)
    shown = {Format.text: show, Format.dot: show_dot, Format.html: show_html}[format](g)
    write((f"<!doctype html><meta charset=utf-8>{shown}" if format is Format.html else shown) + "\n")


def kernels(
    model: Model = DEFAULT_MODEL, chip: Chip = _E.chip, dtype: Dtype = _E.dtype, weights: Weights = _E.weights,
    rows: Rows = 4,
    op: Annotated[str | None, typer.Option("--op", help="Only this op.", show_default=False)] = None,
    rewritten: Annotated[bool, typer.Option(
        "--rewritten/--as-written", help="After the chip's fusions, as it runs.")] = True,
    phase: Phases = Phase.decode, json: Json = False,
) -> None:
    """Show which kernel serves each op on a chip, and why the others do not.

    \b
    Examples:
      afl inspect kernels
      afl inspect kernels --op paged_attention --phase prefill
    """
    m = _outline(model, {"chip": chip, "dtype": dtype, "weights": weights}).model
    from afl.ir.kernel import explain

    # a chip that lacks a kernel cannot be planned, and still is to be explained
    g = _rewritten(m, phase, rows, 0) if rewritten else m.graph(phase, rows)
    found: dict[Any, list[Any]] = {}
    for e in g.eqns:
        types = tuple(v.type if v is not None else None for v in e.ins)
        if op in (None, e.op.name):
            found.setdefault((e.op.name, types), [explain(e.op, types, e.params, m.chip), 0])[1] += 1
    if not found:
        raise ConfigError(unknown("op", str(op), {e.op.name for e in g.eqns}))
    if json:
        rows_ = [
            {"op": c.op, "uses": n, "types": [None if t is None else str(t) for t in c.types],
             "chosen": c.chosen and c.chosen.name, "rejected": dict(c.rejected), "passed": list(c.passed)}
            for c, n in found.values()
        ]
        write(jsons.dumps(rows_) + "\n")
        return
    write("\n".join(f"{c}\n  used by {n} of {len(g.eqns)} equations\n" for c, n in found.values()))


def memory(
    model: Model = DEFAULT_MODEL, chip: Chip = _E.chip, dtype: Dtype = _E.dtype, weights: Weights = _E.weights,
    max_model_len: MaxModelLen = _E.max_model_len, max_seqs: MaxSeqs = _E.max_seqs,
    max_step_tokens: MaxStepTokens = _E.max_step_tokens, kv_blocks: KvBlocks = _E.kv_blocks,
    block_tokens: BlockTokens = _E.block_tokens, json: Json = False,
) -> None:
    """Show the bytes of parameters, cache and temporaries, and the one effective limit on a sequence's length.

    \b
    Examples:
      afl inspect memory
      afl inspect memory --max-seqs 8 --max-model-len 4096 --dtype bfloat16
    """
    options = dict(chip=chip, dtype=dtype, weights=weights, max_model_len=max_model_len, max_seqs=max_seqs,
                   max_step_tokens=max_step_tokens, kv_blocks=kv_blocks, block_tokens=block_tokens)
    m = _outline(model, options).model
    from afl.config import available_memory
    from afl.run.amounts import size
    from afl.run.memory import size_pool

    free = available_memory()
    pool = size_pool(m.caches, m.c.max_len, m.chip, m.dtype, m.config, free)
    peaks = {"decode": _program(m, "decode", max_seqs, 0).plan.peak,
             "prefill": _program(m, "prefill", max_seqs, max_step_tokens).plan.peak}
    found = {
        "param_bytes": m.param_bytes, "block_bytes": pool.block_bytes, "blocks": pool.blocks,
        "block_tokens": pool.block_tokens,
        "cache_bytes": pool.nbytes, "why": pool.why, "max_model_len": pool.max_model_len, "model_max_len": m.c.max_len,
        "available_bytes": free, "peak_bytes": peaks,
    }
    if json:
        write(jsons.dumps(found) + "\n")
        return
    total = m.param_bytes + pool.nbytes + max(peaks.values())
    for name, text in (
        ("parameters", f"{size(m.param_bytes)} as {str(m.dtype).removeprefix('torch.')}"),
        ("cache block", f"{size(pool.block_bytes)}: {pool.block_tokens} tokens of {len(m.caches)} layers"),
        ("cache", f"{size(pool.nbytes)}: {pool.blocks} blocks for {pool.tokens} tokens; sized by {pool.why}"),
        ("longest sequence", f"{pool.max_model_len} tokens (the model's {m.c.max_len})"),
        ("decode step", f"{size(peaks['decode'])} temporaries at most, {max_seqs} rows"),
        ("prefill step", f"{size(peaks['prefill'])} temporaries at most, {max_step_tokens} tokens"),
        ("together", f"{size(total)}; {size(free)} are available on this host"),
    ):
        write(f"{name:<17} {text}\n")


def show_model(
    model: Model = DEFAULT_MODEL, chip: Chip = _E.chip, dtype: Dtype = _E.dtype, weights: Weights = _E.weights,
    tensors: Annotated[bool, typer.Option(
        "--tensors", help="List every tensor of the checkpoint and what it fills.")] = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint is: architecture, sizes, tokenizer, stop ids, tensors left out and why, notices.

    \b
    Examples:
      afl inspect model
      afl inspect model --model ./my-checkpoint --tensors
    """
    found = _outline(model, {"chip": chip, "dtype": dtype, "weights": weights})
    from afl import tree
    from afl.run.load import describe

    m, where = found.model, {p.source: p.param for p in found.plan.pieces}
    row: dict[str, Any] = {
        "path": str(found.checkpoint.path), **describe(m),
        "parameters": sum(_count(t.shape) for t in tree.leaves(m.params)),
        "eos_ids": list(m.eos_ids), "generation_config": m.generation_config,
        "vocabulary": None if m.text is None else m.text.tokenizer.vocab_size,
        "chat_templates": [] if m.text is None or m.text.chat is None else sorted(m.text.chat.templates),
        "tensors": len(found.checkpoint.tensors), "left_out": dict(found.plan.ignored), "notices": list(m.notices),
    }
    if json:
        listed = {n: {"type": str(t), "fills": where.get(n)} for n, t in found.checkpoint.tensors.items()}
        write(jsons.dumps({**row, **({"tensor_list": listed} if tensors else {})}, default=_plain) + "\n")
        return
    for key, value in row.items():
        text = jsons.dumps(value, ensure_ascii=False, default=_plain) if not isinstance(value, str) else value
        write(f"{key:<18} {text}\n")
    if tensors:
        for n, t in found.checkpoint.tensors.items():
            write(f"  {n}  {t}  ->  {where.get(n) or 'left out: ' + found.plan.ignored.get(n, '')}\n")


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def _plain(x: Any) -> Any:
    return attrs.asdict(x) if attrs.has(type(x)) else str(x)


COMMANDS = {"graph": graph, "kernels": kernels, "memory": memory, "model": show_model}
