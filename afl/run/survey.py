"""Every program of an engine, traced with abstract values and summed up as numbers for the whole model.

A model whose layers are alike is traced with two and with three layers; the difference is one layer's share, and all
that is counted follows for any number of layers.  Two alone would not do: the first layer of a step differs from the
others (nothing precedes its norm), and so it may not be scaled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from afl.chip import Chip
from afl.ir.graph import Equation
from afl.ir.jit import Jitted
from afl.ir.kernel import Kernel, explain
from afl.ir.plan import capture_problems
from afl.ir.program import Program
from afl.run.memory import Pool
from afl.run.model import Model
from afl.run.programs import greedy_program, sample_program
from afl.run.roofline import Lengths, Work, total
from afl.run.shards import layers_are_alike, with_layers

FEW = 3                         # layers up to which a model is traced as it is
RESERVED_PER_GROUP = 40         # streams that a communication group takes for itself


@attrs.frozen
class ProgramRow:
    """One kind of program over all its buckets.  `sizes` and the figures are those of the bucket with most bytes."""

    name: str
    buckets: int
    sizes: dict[str, int]
    equations: int
    copies: int
    peak_bytes: int             # temporaries alive at a time, kernel workspace included
    workspace_bytes: int        # the largest that a kernel declares


@attrs.frozen
class KernelRow:
    """A kernel that serves an op in some bucket.  uses: equations per step of the first such bucket."""

    op: str
    chosen: str
    uses: int
    buckets: int
    host: tuple[str, ...]
    capturable: bool
    rejected: dict[str, str]
    passed: tuple[str, ...]


@attrs.frozen
class Capture:
    """Whether the programs can be captured, and how many graphs against the limit of the chip's streams.

    Captured are buckets of decode steps, with as many tokens as rows; others run as programs.  Whole-step capture takes
    one stream a graph, and two more for each communication group in it:
    limit = (streams - 40 groups) / (1 + 2 groups).
    """

    captures: bool
    graphs: int
    limit: int
    problems: tuple[str, ...]


@attrs.frozen(eq=False)
class Step:
    """One step as programs of two and three layers, or of all."""

    programs: tuple[Program, ...]
    layers: int
    tp: int

    def work(self, lengths: Lengths) -> Work:
        """What a step over rows of these lengths does."""
        each = [total(zip(p.graph.eqns, p.plan.kernels, strict=True), lengths, self.tp) for p in self.programs]
        return each[0] if len(each) == 1 else each[0] + (each[1] + each[0] * -1) * (self.layers - 2)


@attrs.frozen(eq=False)
class Survey:
    """What is to be known about the programs of an engine."""

    programs: tuple[ProgramRow, ...]
    kernels: tuple[KernelRow, ...]
    capture: Capture
    decode: Step                # one token for each of max_seqs rows
    prefill: Step               # max_step_tokens tokens

    @property
    def peak_bytes(self) -> int:
        """Bytes beside parameters and cache: of the largest program, since graphs share one pool."""
        return max(p.peak_bytes for p in self.programs)


def survey(model: Model, pool: Pool, tp: int = 1, *, full: bool = False) -> Survey:
    """Trace the programs of an engine over this model (types for parameters will do) and pool, in every bucket.

    tp: ranks whose communication stays in the programs.  full: trace all layers, whatever they are.
    """
    eager, model = model.config.eager, attrs.evolve(model, config=attrs.evolve(model.config, eager=False))
    n = model.c.layers
    scaled = not full and n > FEW and layers_are_alike(model.definition.params(model.c), model.caches)
    models = [model.resized(with_layers(model.c, k)) for k in (2, 3)] if scaled else [model]
    c, chip = model.config, model.chip
    kernels: dict[Any, KernelRow] = {}
    rows: list[ProgramRow] = []
    problems: dict[str, None] = {}
    steps: dict[str, Step] = {}
    decode_buckets = 0
    for make in (greedy_program, sample_program):
        jits = [_on_ranks(make(m, pool), m, tp) for m in models]
        buckets = _buckets(jits[0])
        most: ProgramRow | None = None
        for sizes in buckets:
            several = tuple(j.program(**sizes).program for j in jits)
            row = _row(make.__name__, len(buckets), sizes, several, n)
            most = row if most is None or row.peak_bytes > most.peak_bytes else most
            _add_kernels(kernels, several, n, chip)
        assert most is not None
        rows.append(most)
        problems |= dict.fromkeys(_problems(jits[0], buckets[0]))
        decode_buckets += sum(z["tokens"] == z["rows"] for z in buckets)
        if make is greedy_program:
            width = buckets[0]["width"]
            for name, t, r in (("decode", c.max_seqs, c.max_seqs), ("prefill", c.max_step_tokens, 1)):
                exact = [_exact(j, m, tokens=t, rows=r, width=width) for j, m in zip(jits, models, strict=True)]
                steps[name] = Step(tuple(exact), n, tp)
    problems |= {f"{k.op}/{k.chosen} is not capturable": None for k in kernels.values() if not k.capturable}
    graphs = decode_buckets if chip.captures and not eager else 0
    capture = Capture(chip.captures and not eager, graphs, graph_limit(chip, tp), tuple(problems) * chip.captures)
    return Survey(tuple(rows), tuple(kernels.values()), capture, steps["decode"], steps["prefill"])


def graph_limit(chip: Chip, tp: int = 1, dp: int = 1) -> int:
    """Captured graphs that the chip's streams allow at a time, whole steps; 0 on a chip that captures none.

    >>> from afl.chip import Limits
    >>> it = Chip("any", limits=Limits(graph_streams=1800))
    >>> graph_limit(it), graph_limit(it, tp=4)
    (1800, 586)
    """
    groups = (tp > 1) + (dp > 1)
    return max(0, chip.limits.graph_streams - RESERVED_PER_GROUP * groups) // (1 + 2 * groups)


def _on_ranks(made: Jitted, model: Model, tp: int) -> Jitted:
    """The same programs with their communication over tp ranks left in."""
    return Jitted(attrs.evolve(made.options, mesh={"tp": tp})).bind(model.params) if tp > 1 else made


def _buckets(made: Jitted) -> list[dict[str, int]]:
    """Every declared size, largest first: the buckets of the ladder, or the upper end of the range of one program."""
    if made.options.ladder is not None:
        return made.options.ladder.buckets()
    return [{n: hi for n, (_, hi) in r.items()} for r in made.options.ranges]


def _exact(made: Jitted, model: Model, **sizes: int) -> Program:
    """The program that runs these sizes where there are buckets, else one that is traced at exactly them."""
    if made.options.ladder is not None:
        return made.program(**sizes).program
    free = Jitted(attrs.evolve(made.options, ranges=(), strict=False)).bind(model.params)
    return free.program(**sizes).program


def _scaled(of: Callable[[Program], int], several: Sequence[Program], n: int) -> int:
    """A figure of the whole model."""
    two, *more = (of(p) for p in several)
    return two + (more[0] - two) * (n - 2) if more else two


def _row(name: str, buckets: int, sizes: dict[str, int], several: Sequence[Program], n: int) -> ProgramRow:
    return ProgramRow(
        name, buckets, sizes, _scaled(lambda p: len(p.graph.eqns), several, n),
        _scaled(lambda p: len(p.plan.copies), several, n), _scaled(lambda p: p.plan.peak, several, n),
        _scaled(_workspace, several, n),
    )


def _workspace(p: Program) -> int:
    pairs: list[tuple[Equation, Kernel]] = list(zip(p.graph.eqns, p.plan.kernels, strict=True))
    return max((k.workspace(*(v and v.type for v in e.ins), **dict(e.params)) for e, k in pairs if k.workspace),
               default=0)


def _add_kernels(found: dict[Any, KernelRow], several: Sequence[Program], n: int, chip: Chip) -> None:
    """Note the kernels of one bucket; why the others were not taken is asked once per kernel."""
    last = several[-1]
    here: dict[Any, Equation] = {}
    for e, k in zip(last.graph.eqns, last.plan.kernels, strict=True):
        here.setdefault((e.op.name, k.name), e)
    for key, e in here.items():
        if key in found:
            found[key] = attrs.evolve(found[key], buckets=found[key].buckets + 1)
            continue
        k = next(k for k in last.plan.kernels if (k.op.name, k.name) == key)
        why = explain(e.op, tuple(v and v.type for v in e.ins), e.params, chip)
        uses = _scaled(lambda p: sum((q.op.name, q.name) == key for q in p.plan.kernels), several, n)  # noqa: B023
        found[key] = KernelRow(e.op.name, k.name, uses, 1, k.host, k.capturable, dict(why.rejected), why.passed)


def _problems(made: Jitted, sizes: dict[str, int]) -> list[str]:
    """What beside kernels prevents capture."""
    return [row for row in capture_problems(made.program(**sizes).program.plan) if "is not capturable" not in row]
