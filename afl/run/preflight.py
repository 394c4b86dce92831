"""`afl check`: what a model would need and do on a chip, from its config alone.  No weight is read, no kernel runs.

Rules first (`rules.py`); then the engine's own programs with abstract values (`survey.py`), bytes from their plans, and
a bound on the time of a step (`roofline.py`).
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from afl import config as configs
from afl import tree
from afl.chip import Chip
from afl.config import EngineConfig
from afl.errors import ConfigError
from afl.models.checkpoint import open_checkpoint
from afl.models.json_file import read_json
from afl.models.locate import locate
from afl.models.spec import ModelDef
from afl.plugins import chip as chip_named
from afl.run.ask import Ask, Budget, Wish
from afl.run.load import abstract_model, asked, most_stored
from afl.run.memory import SHARE, Pool, tokens_of_block
from afl.run.model import Model
from afl.run.report import Fit, HostLengths, Memory, Report
from afl.run.roofline import Lengths, StepTime, step_time
from afl.run.rules import legal_tp, problems
from afl.run.shards import local
from afl.run.survey import Survey, survey
from afl.run.unserved import unserved

FRACTION = 0.9                  # of a device's memory
GROUP_BYTES = 2 * (200 << 20)   # send and receive buffer of a communication group, the library's default size


@attrs.frozen
class Source:
    """What is asked about: config.json, and the dtype that most numbers are stored in ("" if unknown)."""

    settings: Mapping[str, Any]
    stored: str
    where: str


def source(model: str | Path) -> Source:
    """The config behind a name: a config.json, a folder with or without weights, a .gguf file, an alias.

    Raises BadInput with one clear message.
    """
    path = locate(str(model), configs.environment())
    file = path / "config.json" if path.is_dir() else path
    weights = path.is_dir() and any(path.glob("*.safetensors*"))
    if file.suffix == ".json" and file.exists() and not weights:
        settings = read_json(file)
        names = settings.get("architectures")
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            raise ConfigError(f"{file} names no architecture: 'architectures' must be a list of names")
        stored = settings.get("dtype", settings.get("torch_dtype"))
        return Source(settings, stored if isinstance(stored, str) else "", str(file))
    checkpoint = open_checkpoint(path)
    return Source(checkpoint.config, most_stored(checkpoint.tensors), str(path))


def check(
    model: str | Path | Source, chip: str = "cpu", *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1,
    fraction: float = FRACTION, others: int = 0, **options: Any,
) -> Report:
    """Whether a model can be served so, and what it takes.

    options: fields of EngineConfig; values that do not hold are violations in the report.  fraction: share of the
    device's memory that may be used.  others: bytes of it in use by other processes.  Raises BadInput for a model that
    cannot be found or whose config does not hold, and for an unknown chip or option.
    """
    known_options(options)
    it = model if isinstance(model, Source) else source(model)
    wish: Any = Wish({**options, "chip": chip})
    found = chip_named(chip)
    sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
    definition, ask = asked(it.settings, wish, found, it.stored, **sizes)
    report = Report(it.where, str(it.settings["architectures"][0])[:80], found.name, str(wish.weights), sizes,
                    tuple(problems(ask)), dtype=ask.dtype or "")
    if definition is not None:
        report = attrs.evolve(report, layers=ask.c.layers, parameters=_count(definition, ask.c))
    if report.violations:
        return report
    assert definition is not None, "the rules about models hold"
    return _measured(report, definition, attrs.evolve(ask, config=EngineConfig(**{**options, "chip": chip})), fraction,
                     others)


def known_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for names that are no fields of EngineConfig, with the nearest ones."""
    fields = {f.name: f.default for f in attrs.fields(EngineConfig)}
    EngineConfig.of({name: fields.get(name, value) for name, value in options.items()})


def _measured(report: Report, definition: ModelDef, ask: Ask, fraction: float, others: int) -> Report:
    """The report on what the rules allow, with everything that the programs tell."""
    chip, tp, c, config = ask.chip, ask.tp, ask.c, ask.config
    model = one_rank(definition, ask)
    assert chip is not None
    dtype = model.dtype
    ask = attrs.evolve(ask, unserved=unserved(model))
    if ask.unserved:
        return attrs.evolve(report, violations=tuple(problems(ask)))
    size = tokens_of_block(model.caches, chip, config.block_tokens)
    block = sum(s.block_bytes(size, dtype) for s in model.caches)
    wish = config.max_model_len or c.max_len
    device = chip.limits.memory_bytes
    memory, others = (device, others) if device else (configs.available_memory(), 0)
    most = config.kv_blocks or max(1, int(memory * fraction) // block)
    pool = Pool(min(most, config.max_seqs * -(-wish // size)), size, block, min(wish, most * size), "")
    found = survey(model, pool, tp)
    buffers = GROUP_BYTES if tp > 1 else 0
    if device:
        own = model.param_bytes + found.peak_bytes + buffers
        budget = Budget(memory, fraction, others, own, block, f"chip {chip.name}")
        if not budget.blocks:
            budget = attrs.evolve(budget, ranks=_ranks_that_hold(model, c, budget, tp))
    else:           # the host: what `size_pool` will find there
        share = 1.0 if config.kv_blocks else 1 / SHARE
        budget = Budget(memory, share, 0, 0, block, "this host's available memory")
    wrong = problems(attrs.evolve(ask, budget=budget))
    blocks = 0 if wrong else config.kv_blocks or budget.blocks
    longest = min(wish, blocks * size)
    fit = Fit(size, block, blocks, blocks * size, longest, blocks // -(-wish // size))
    used = Memory(
        memory, budget.usable, others, model.param_bytes, found.peak_bytes,
        max(p.workspace_bytes for p in found.programs), buffers, (blocks + 1) * block * (blocks > 0),
    )
    steps, host = ((), None) if wrong else _steps(found, config, fit, chip)
    return attrs.evolve(
        report, violations=tuple(wrong), notes=tuple(_notes(ask, chip, wish, fit, found)), bin=chip.roofline.bin,
        memory=used, fit=fit, programs=found.programs, kernels=found.kernels, host=host, capture=found.capture,
        steps=steps,
    )


def one_rank(definition: ModelDef, ask: Ask) -> Model:
    """The model of one of `ask.tp` ranks, with types for parameters."""
    whole = abstract_model(definition, ask)
    return whole.resized(local(ask.c, ask.tp))


def _ranks_that_hold(model: Model, c: Any, b: Budget, tp: int) -> int:
    """The next tp at which parameters, the temporaries of now and two blocks fit; 0 if none does."""
    rest = b.own - model.param_bytes + GROUP_BYTES * (tp == 1) + 2 * b.block
    for n in legal_tp(c):
        if n > tp:
            m = model.resized(local(c, n))
            if m.param_bytes + rest <= b.usable:
                return n
    return 0


def _steps(found: Survey, config: EngineConfig, fit: Fit, chip: Chip) -> tuple[tuple[StepTime, ...], HostLengths]:
    """Decode with every row as long as all can be together, and one prefill of the largest step."""
    rows = min(config.max_seqs, fit.blocks)
    context = max(1, min(fit.max_model_len, fit.tokens // rows))
    decode = Lengths(((1, context - 1),) * config.max_seqs)
    whole, rest = divmod(config.max_step_tokens, fit.max_model_len)
    prefill = Lengths(((fit.max_model_len, 0),) * whole + (((rest, 0),) if rest else ()))
    works = {"decode": (found.decode.work(decode), decode), "prefill": (found.prefill.work(prefill), prefill)}
    d = works["decode"][0]
    host = HostLengths(d.host_vectors, d.host_elements, *d.host_us)
    return tuple(step_time(name, w, at, chip.roofline) for name, (w, at) in works.items()), host


def _notes(ask: Ask, chip: Chip, wish: int, fit: Fit, found: Survey) -> Iterator[str]:
    if ask.tp > 1:
        yield f"not yet: `afl run` has one rank; these figures are those of each of {ask.tp} once it has more"
        if ask.tp > ask.c.k:
            yield f"{ask.c.k} kv heads over {ask.tp} ranks: each head is held by {ask.tp // ask.c.k} of them"
        if not chip.roofline.link_bytes_per_s and chip.roofline.memory_bytes_per_s:
            yield f"chip {chip.name} has no link to peers: what ranks exchange goes through the host"
    if 0 < fit.blocks and fit.max_model_len < wish:
        yield f"the cache holds {fit.tokens} tokens, fewer than the {wish} asked for: no longer sequence is admitted"
    if found.capture.graphs > found.capture.limit:
        yield (f"{found.capture.graphs} graphs do not fit the streams of older firmware ({found.capture.limit}); a "
               "smaller max_step_tokens or max_seqs makes fewer")
    if chip.captures and not any(p.workspace_bytes for p in found.programs):
        yield "the workspace of vendor operators is known to the device only, and not counted"


def _count(definition: ModelDef, c: Any) -> int:
    return sum(math.prod(spec.shape) for spec in tree.leaves(definition.params(c)))
