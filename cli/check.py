"""`afl check`: whether a model can be served on a chip, and what it takes, from its config alone."""

import json as jsons
from typing import Annotated, Any

import typer

from afl import chip as chips
from afl.config import EngineConfig
from afl.errors import ConfigError, unknown

from .early import find_chip, policies
from .run import DEFAULT_MODEL, BlockTokens, Chip, Dtype, Json, KvBlocks, MaxModelLen, Weights
from .terminal import busy, write

_E = EngineConfig()
_PARALLEL = "Parallel sizes"


def _ranks(help: str, name: str) -> Any:
    return typer.Option(name, min=1, max=1 << 16, help=help, metavar="N", rich_help_panel=_PARALLEL)


def check(
    model: Annotated[str, typer.Option(
        "--model", "-m", metavar="PATH|NAME", rich_help_panel="Model", help=
        "A config.json, a folder that holds one, a .gguf file, an alias. Weights are not needed.")] = DEFAULT_MODEL,
    chip: Chip = _E.chip,
    compare: Annotated[str | None, typer.Option(
        "--compare", metavar="A,B,...", rich_help_panel="Output", show_default=False,
        help="Several chips side by side, instead of --chip.")] = None,
    tp: Annotated[int, _ranks("Tensor parallel ranks.", "--tp")] = 1,
    pp: Annotated[int, _ranks("Pipeline stages.", "--pp")] = 1,
    dp: Annotated[int, _ranks("Data parallel engines.", "--dp")] = 1,
    ep: Annotated[int, _ranks("Ranks over which experts are spread.", "--ep")] = 1,
    dtype: Dtype = _E.dtype,
    weights: Weights = _E.weights,
    max_model_len: MaxModelLen = _E.max_model_len,
    max_seqs: Annotated[int, typer.Option(
        help="Most requests that run at a time.", metavar="N", rich_help_panel="Engine")] = _E.max_seqs,
    max_step_tokens: Annotated[int, typer.Option(
        "--max-step-tokens", "--token-budget", help="Most tokens that one step computes.", metavar="N",
        rich_help_panel="Engine")] = _E.max_step_tokens,
    kv_blocks: KvBlocks = _E.kv_blocks,
    block_tokens: BlockTokens = _E.block_tokens,
    eager: Annotated[bool, typer.Option("--eager", rich_help_panel="Engine", help="Nothing is captured.")] = _E.eager,
    depth: Annotated[int, typer.Option(metavar="N", rich_help_panel="Engine", help="Steps in flight.")] = _E.depth,
    policy: Annotated[str, typer.Option(
        metavar="NAME|FILE", rich_help_panel="Engine", help=f"Scheduler policy: {', '.join(policies())}.")] = _E.policy,
    memory_fraction: Annotated[float, typer.Option(
        metavar="X", rich_help_panel="Engine", help="Share of the chip's memory that may be used.")] = 0.9,
    used_bytes: Annotated[int, typer.Option(
        min=0, metavar="N", rich_help_panel="Engine", help="Bytes of it that other processes use.")] = 0,
    json: Json = False,
    markdown: Annotated[bool, typer.Option(
        "--markdown", rich_help_panel="Output", help="The page docs/rules.md: every rule, what chips take.")] = False,
) -> None:
    """Tell whether a model can be served on a chip, and what it takes, before there is a chip.

    Traces every program with abstract values and reads no weight. Bytes are those of one rank; times are the least
    that the chip's figures allow. Status: 0 supported, 1 not, 2 bad input.

    \b
    Examples:
      afl check --chip a3
      afl check --model ./Llama-3.1-70B/config.json --chip a3 --tp 8 --max-model-len 32768
      afl check --model ./config.json --compare a2,a3,a5,310p
      afl check --chip a2 --json
    """
    if markdown:
        from .rules_page import page

        write(page())
        return
    names = compare.split(",") if compare is not None else [chip]
    for name in names:
        if find_chip(name) is None:
            raise ConfigError(unknown("chip", name, chips.names()))
    if not 0 < memory_fraction <= 1:
        raise ConfigError(f"--memory-fraction is {memory_fraction}, must be above 0 and at most 1")
    options: dict[str, Any] = dict(
        dtype=dtype, weights=weights, max_model_len=max_model_len, max_seqs=max_seqs, max_step_tokens=max_step_tokens,
        kv_blocks=kv_blocks, block_tokens=block_tokens, eager=eager, depth=depth, policy=policy,
    )
    with busy(f"checking {model}"):
        from afl.run import preflight, report

        it = preflight.source(model)
        ranks: dict[str, Any] = dict(tp=tp, pp=pp, dp=dp, ep=ep)
        found = [preflight.check(it, name, **ranks, fraction=memory_fraction, others=used_bytes, **options)
                 for name in names]
    if json:
        records = [r.record() for r in found]
        write(jsons.dumps(records if compare is not None else records[0]) + "\n")
    else:
        write(report.compare(found) if compare is not None else str(found[0]))
    if not all(r.supported for r in found):
        raise typer.Exit(1)
