"""What is known about chips as text: figures with their sources, and the page docs/chips.md."""

from collections.abc import Iterable
from typing import Any

HEAD = """# Chips

Written by `afl chips --markdown > docs/chips.md`; a test compares.  A figure is *public* (the vendor's or press), read
from *code* that the vendor or users publish, or *assumed*; 0 or a dash means unknown or none.
"""
KERNELS = """## Kernels by op

In order of preference, if dtypes, formats and sizes fit; `afl inspect kernels --chip NAME` says which one a model gets
and why not the others.  *reference* is the op's meaning in plain torch, which no NPU chip may run.
"""


def figures(c: Any) -> list[tuple[str, ...]]:
    """A header, then one row per bin: operations per second, memory, bytes per second."""
    kinds = list(dict.fromkeys(kind for r in c.rooflines for kind in r.flops))
    rows: list[tuple[str, ...]] = [
        ("bin", *(f"T{k}/s" for k in kinds), "memory GiB", "GB/s", "to peers GB/s", "to host GB/s")
    ]
    for r in c.rooflines:
        flops = (_number(r.flops.get(k, 0) / 1e12) for k in kinds)
        speeds = (_number(x / 1e9) for x in (r.memory_bytes_per_s, r.link_bytes_per_s, r.host_bytes_per_s))
        rows.append((r.bin or "-", *flops, _number(r.memory_bytes / 2**30), *speeds))
    return rows


def sources(c: Any) -> dict[str, str]:
    """Where each figure comes from; bins that differ are named."""
    found: dict[str, dict[str, list[str]]] = {}
    for r in c.rooflines:
        for figure, where in r.sources.items():
            found.setdefault(figure, {}).setdefault(where, []).append(r.bin)
    return {
        figure: "; ".join(where if len(ways) == 1 else f"{', '.join(bins)}: {where}" for where, bins in ways.items())
        for figure, ways in found.items()
    }


def columns(rows: list[tuple[str, ...]]) -> str:
    """Rows under each other, columns two blanks apart."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() + "\n" for r in rows)


def page(chips: list[Any], ops: Iterable[Any]) -> str:
    """docs/chips.md: features and limits, figures of every bin, kernels of every op on every chip."""
    facts: list[tuple[str, ...]] = [("", *(f"`{c.name}`" for c in chips))]
    for title, fact in FACTS.items():
        facts.append((title, *(fact(c) or "-" for c in chips)))
    parts = [HEAD, _table(facts), "## Figures\n"]
    for c in chips:
        if c.roofline.bin:
            parts += [f"### {c.name}: {c.note}\n", _table(figures(c)),
                      "".join(f"- {figure}: {where}\n" for figure, where in sources(c).items())]
    rows: list[tuple[str, ...]] = [("op", *(f"`{c.name}`" for c in chips))]
    rows += [(o.name, *(", ".join(_kernels(o, c)) or "-" for c in chips)) for o in ops]
    return "\n".join([*parts, KERNELS, _table(rows)])


def _kernels(op: Any, c: Any) -> list[str]:
    """Kernels whose features and dtypes the chip has, in the order in which they are tried."""
    names = {f"torch.{d}" for d in c.dtypes}
    fit = [k for k in op.kernels if k.needs <= c.features and (k.dtypes is None or names & set(map(str, k.dtypes)))]
    order = c.prefer.get(op.name, ())
    fit.sort(key=lambda k: (order.index(k.name) if k.name in order else len(order), -k.priority, k.name))
    return [*(k.name for k in fit), *["*reference*"] * (c.allows_reference and not fit)]


def _block(c: Any) -> str:
    default, allowed = c.limits.block_tokens
    most = f"; times channels at most {c.limits.block_elements}" * bool(c.limits.block_elements)
    return f"{default}, of {', '.join(map(str, allowed)) or 'any'}{most}"


FACTS = {
    "what": lambda c: c.note,
    "SoC": lambda c: ", ".join(c.soc),
    "dtypes, first is the default": lambda c: ", ".join(c.dtypes),
    "features": lambda c: ", ".join(sorted(c.features)),
    "tokens of a cache block": _block,
    "layouts": lambda c: ", ".join(f"{role} {name}" for role, name in c.layouts.items()),
    "graph streams": lambda c: str(c.limits.graph_streams),
    "cube and vector cores": lambda c: f"{c.limits.cube_cores}, {c.limits.vector_cores}" * bool(c.limits.cube_cores),
}


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(r) + " |" for r in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def _number(x: float) -> str:
    return f"{x:g}" if x else "-"
