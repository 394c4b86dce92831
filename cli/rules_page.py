"""The page docs/rules.md: the table of rules as it is, and what each chip takes by it."""

from collections.abc import Iterator
from typing import Any

from afl.run.ask import TABLE, Wish
from afl.run.rules import legal_tp, problems

HEAD = """# Rules and what chips take

Written by `afl check --markdown > docs/rules.md`; a test compares.  `afl run` refuses by this table before anything is
loaded, `afl check` reports by it, both with the same words and with everything that does not hold at once.

## Rules

*Not yet* marks what will be possible one day.
"""
MATRIX = """## What chips take

For a small Llama in each of these ways, everything else left at its default.  A dash: the table refuses it.
"""
TP = """## Tensor parallel sizes

Sizes that the table allows, for the published shapes of a few models.  Running on several ranks is not there yet; the
figures of `afl check` hold for one of the ranks.
"""
SHAPES = {      # layers, d, h, k, f, v
    "Llama 3.1 8B": (32, 4096, 32, 8, 14336, 128256), "Llama 3.1 70B": (80, 8192, 64, 8, 28672, 128256),
    "Llama 3.1 405B": (126, 16384, 128, 8, 53248, 128256), "Qwen3 0.6B": (28, 1024, 16, 8, 3072, 151936),
    "Qwen3 32B": (64, 5120, 64, 8, 25600, 151936), "SmolLM2 135M": (30, 576, 9, 3, 1536, 49152),
}
WAYS: dict[str, list[dict[str, Any]]] = {
    "dtype": [{"dtype": n} for n in ("float32", "bfloat16", "float16")],
    "weights": [{"weights": n} for n in ("float32", "bfloat16", "float16", "int8", "int8-channel", "int8-dynamic",
                                         "int4", "int4-sym", "int4-dynamic")],
    "block_tokens": [{"block_tokens": n} for n in (16, 64, 100, 128, 256)],
    "heads of 256 channels": [{"head_dim": 256, "block_tokens": n} for n in (0, 64, 128)],
    "depth": [{"depth": n} for n in (1, 2, 3)],
    "eager, checked, references": [{n: True} for n in ("eager", "checked", "references")],
    "policy": [{"policy": n} for n in ("fcfs", "priority", "recompute", "fcfs+watermark")],
}


def settings(layers: int, d: int, h: int, k: int, f: int, v: int) -> dict[str, Any]:
    """config.json of a Llama of these sizes."""
    return dict(
        architectures=["LlamaForCausalLM"], num_hidden_layers=layers, hidden_size=d, num_attention_heads=h,
        num_key_value_heads=k, intermediate_size=f, vocab_size=v, max_position_embeddings=4096,
    )


def page() -> str:
    """docs/rules.md."""
    from afl import chip as chips
    from afl import plugins

    plugins.load_models()
    rules = [("rule", "about", "what holds", "")]
    rules += [(r.name, ", ".join(r.options), r.why, "not yet" * r.not_yet) for r in TABLE]
    found = [plugins.chip(n) for n in chips.names()]
    matrix = [("", *(f"`{c.name}`" for c in found)), *_matrix(found)]
    sizes = [("model", "tp"), *((name, ", ".join(map(str, legal_tp(_config(settings(*s)))))) for name, s in
             SHAPES.items())]
    return "\n".join([HEAD, _table(rules), MATRIX, _table(matrix), TP, _table(sizes)])


def _matrix(found: list[Any]) -> Iterator[tuple[str, ...]]:
    for what, ways in WAYS.items():
        cells = []
        for chip in found:
            good = [way for way in ways if not _wrong(chip, way)]
            cells.append(", ".join(str(list(w.values())[-1] if list(w.values())[-1] is not True else list(w)[-1])
                                   for w in good) or "-")
        yield what, *cells


def _wrong(chip: Any, way: dict[str, Any]) -> bool:
    from afl.run.load import asked

    it = settings(2, 64, 4, 2, 96, 128) | {n: v for n, v in way.items() if n == "head_dim"}
    wish: Any = Wish({n: v for n, v in way.items() if n != "head_dim"} | {"chip": chip.name})
    return bool(problems(asked(it, wish, chip)[1]))


def _config(it: dict[str, Any]) -> Any:
    from afl.run.load import definition_of

    return definition_of(it).config(it)


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(r) + " |" for r in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"
