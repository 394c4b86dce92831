"""The answer of `afl check` as a value, and as one screen of text."""

from typing import Any

import attrs

from afl.run.amounts import seconds, size
from afl.run.ask import Violation
from afl.run.roofline import StepTime
from afl.run.survey import Capture, KernelRow, ProgramRow


@attrs.frozen
class Memory:
    """Bytes of one rank.  usable: what may be used of the device; the cache gets what the rest leaves."""

    device_bytes: int
    usable_bytes: int
    others_bytes: int
    weight_bytes: int
    activation_bytes: int           # temporaries of the largest program
    workspace_bytes: int            # declared by kernels, contained in the former
    communication_bytes: int        # buffers of the communication groups
    cache_bytes: int                # all blocks that fit, the null block included


@attrs.frozen
class Fit:
    """What the cache holds.  blocks: usable ones.  full_requests: sequences of the whole wished length."""

    block_tokens: int
    block_bytes: int
    blocks: int
    tokens: int
    max_model_len: int
    full_requests: int


@attrs.frozen
class HostLengths:
    """Operands that kernels take on the host: vectors per decode step, their elements, and the estimated cost."""

    vectors: int
    elements: int
    least_us: float
    most_us: float


@attrs.frozen
class Report:
    """Everything that `afl check` knows.  What was not looked at, because a rule does not hold, is None or empty.

    supported: no rule is broken and the cache has a block.  runs_today: `afl run` can do it with what there is.
    """

    model: str
    architecture: str
    chip: str
    weights: str
    parallel: dict[str, int]
    violations: tuple[Violation, ...] = ()
    notes: tuple[str, ...] = ()
    dtype: str = ""
    bin: str = ""
    parameters: int = 0
    layers: int = 0
    memory: Memory | None = None
    fit: Fit | None = None
    programs: tuple[ProgramRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    host: HostLengths | None = None
    capture: Capture | None = None
    steps: tuple[StepTime, ...] = ()

    @property
    def supported(self) -> bool:
        return not self.violations

    @property
    def runs_today(self) -> bool:
        return self.supported and all(n == 1 for n in self.parallel.values())

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {"supported": self.supported, "runs_today": self.runs_today, **attrs.asdict(self)}

    def __str__(self) -> str:
        return screen(self)


def screen(r: Report) -> str:
    """The report as text for a terminal."""
    rows = [*_head(r), *_memory(r), *_steps(r), *_programs(r), *_kernels(r), *(("note", n) for n in r.notes)]
    return "".join(f"{name:<16} {text}\n" for name, text in rows)


def compare(reports: list[Report]) -> str:
    """Chips side by side: the figures that differ."""
    table = [["", *(r.chip for r in reports)]]
    for name, value in COLUMNS.items():
        table.append([name, *(value(r) for r in reports)])
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    text = "".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in table)
    return text + "".join(f"{r.chip}: {v}\n" for r in reports for v in r.violations)


def _head(r: Report) -> list[tuple[str, str]]:
    sizes = " x ".join(f"{axis} {n}" for axis, n in r.parallel.items() if n > 1) or "one rank"
    verdict = "yes" if r.runs_today else "the figures hold, running does not yet" if r.supported else "no"
    count = (f"{r.parameters / 1e9:.2f} G" if r.parameters >= 1e9 else f"{r.parameters / 1e6:.1f} M") + " parameters"
    what = f"{r.architecture}, {r.layers} layers, {count}, {r.dtype}" if r.layers else r.architecture
    how = f"{r.chip}" + (f" ({r.bin})" if r.bin else "") + f", {sizes}"
    return [("model", what), ("on", how), ("supported", verdict), *(("  violation", str(v)) for v in r.violations)]


def _memory(r: Report) -> list[tuple[str, str]]:
    m, f = r.memory, r.fit
    if m is None or f is None:
        return []
    many = " per rank" if r.parallel["tp"] > 1 else ""
    rows = [
        ("memory" + many, f"{size(m.usable_bytes)} of {size(m.device_bytes)} may be used"
         + (f"; {size(m.others_bytes)} are in use by others" if m.others_bytes else "")),
        ("  weights", f"{size(m.weight_bytes)} ({m.weight_bytes} bytes), held as {r.weights}"),
        ("  activations", f"{size(m.activation_bytes)} in the largest step, kernel workspace "
         f"{size(m.workspace_bytes)} included"),
    ]
    if m.communication_bytes:
        rows.append(("  communication", f"{size(m.communication_bytes)} of buffers"))
    rows.append(("  cache", f"{size(m.cache_bytes)}: {f.blocks} blocks of {f.block_tokens} tokens and "
                 f"{size(f.block_bytes)}"))
    rows.append(("fits", f"{f.tokens} tokens, {f.full_requests} requests of full length; longest sequence "
                 f"{f.max_model_len} tokens"))
    return rows


def _steps(r: Report) -> list[tuple[str, str]]:
    rows = []
    for s in r.steps:
        what = f"{s.rows} rows of {s.context}" if s.phase == "decode" else f"{s.tokens} tokens"
        parts = (("compute", s.compute_s), ("memory", s.memory_s), ("link", s.link_s or None),
                 ("host", s.host_s or None))
        text = ", ".join(f"{name} {seconds(x)}" for name, x in parts if x is not None)
        least = "no figures for this chip" if s.seconds is None else (
            f"at least {seconds(s.seconds)}, {s.tokens / s.seconds:.0f} tokens/s, limited by {s.limit}")
        rows.append((f"{s.phase} step", f"{what}: {least} ({text or '-'})"))
    return rows


def _programs(r: Report) -> list[tuple[str, str]]:
    rows = [("program", f"{p.name}: {p.buckets} bucket{'s' * (p.buckets != 1)}, {p.equations} equations, {p.copies} "
             f"copies, {size(p.peak_bytes)} of temporaries") for p in r.programs]
    if r.host is not None and r.host.vectors:
        h = r.host
        rows.append(("host lengths", f"{h.vectors} vectors, {h.elements} numbers per decode step: "
                     f"{h.least_us / 1e3:.1f} to {h.most_us / 1e3:.1f} ms of host time"))
    c = r.capture
    if c is not None:
        text = "this chip captures no graphs, or eager was asked for" if not c.captures else (
            f"{c.graphs} graphs of at most {c.limit}" + (" (more than the streams allow)" * (c.graphs > c.limit)))
        rows.append(("capture", text))
        rows += [("  prevented by", p) for p in c.problems]
    return rows


def _kernels(r: Report) -> list[tuple[str, str]]:
    rows = []
    for k in r.kernels:
        lost = [*(f"{n} ({why})" for n, why in k.rejected.items() if n != "reference"), *(f"{n} (later)" for n in
                k.passed if n != "reference")]
        facts = "; host lengths" * bool(k.host) + "; not capturable" * (not k.capturable)
        rows.append((f"  {k.op}", f"{k.chosen} x{k.uses}{facts}" + (f"; not {', '.join(lost)}" if lost else "")))
    return [("kernels", "per step, and what was rejected"), *rows] if rows else []


def _step(r: Report, phase: str) -> str:
    found = next((s for s in r.steps if s.phase == phase), None)
    return "-" if found is None or found.seconds is None else f"{seconds(found.seconds)} ({found.limit})"


COLUMNS: dict[str, Any] = {
    "supported": lambda r: "yes" if r.supported else f"no: {len(r.violations)} violation(s)",
    "dtype": lambda r: r.dtype or "-",
    "usable memory": lambda r: size(r.memory.usable_bytes) if r.memory else "-",
    "weights": lambda r: size(r.memory.weight_bytes) if r.memory else "-",
    "activations": lambda r: size(r.memory.activation_bytes) if r.memory else "-",
    "cache": lambda r: size(r.memory.cache_bytes) if r.memory else "-",
    "tokens that fit": lambda r: str(r.fit.tokens) if r.fit else "-",
    "full requests": lambda r: str(r.fit.full_requests) if r.fit else "-",
    "decode step": lambda r: _step(r, "decode"),
    "prefill step": lambda r: _step(r, "prefill"),
    "host lengths": lambda r: f"{r.host.least_us / 1e3:.1f} to {r.host.most_us / 1e3:.1f} ms" if r.host else "-",
    "graphs": lambda r: f"{r.capture.graphs} of {r.capture.limit}" if r.capture and r.capture.captures else "-",
    "not capturable": lambda r: str(len(r.capture.problems)) if r.capture else "-",
    "attention": lambda r: ", ".join(k.chosen for k in r.kernels if k.op == "paged_attention") or "-",
}
