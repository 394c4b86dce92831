"""The options that the commands of `afl eplb` share, and what they mean: loads, a placement, a topology, parameters.

Nothing of numpy is imported before a command runs, so that help is quick.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import attrs
import typer

import afl
from afl.errors import BadInput, ConfigError, unknown, violations

_FILES = (Path(str(afl.__file__)).parent / "dist" / "eplb" / "policies").glob("*.py")
POLICIES = sorted(f.stem for f in _FILES if f.stem != "__init__")
TRACE = "trace:"


def _shared() -> dict[str, inspect.Parameter]:
    """Name -> parameter of every shared option.  Defaults are those of the planner's `Params`."""
    out: dict[str, inspect.Parameter] = {}

    def add(name: str, kind: Any, default: Any, panel: str, help: str, *names: str, metavar: str = "",
            **more: Any) -> None:
        metavar = metavar or {int: "N", float: "X"}.get(kind, "FILE")
        said = default not in (None, 0)
        option = typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=said, **more)
        out[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                      annotation=Annotated[kind, option])

    add("load", list[str], inspect.Parameter.empty, "Load",
        "Recorded token counts: .npz, .npy, .json or .pt; repeat for the parts of a trace. trace:NAME makes one up.",
        "--load", "-l", metavar="FILE")
    add("recorded_under", str | None, None, "Load",
        "The load counts per slot of this placement, as vLLM-Ascend's moe_load does.")
    add("window_steps", int, 1, "Load", "Engine steps that one row of the load sums.", min=1)
    add("ranks", int, 0, "Placement", "Expert-parallel ranks; needed unless --placement says it.", min=0)
    add("slots", int, 0, "Placement",
        "Physical expert slots over all ranks. Default: one more per rank than the experts need.", min=0)
    add("placement", str | None, None, "Placement",
        "Where experts are now: .npz or vLLM-Ascend's expert map (.json). Default: in order, then copies.")
    add("topology", str | None, None, "Placement",
        "Nodes, die pairs and link speeds (.json). Default: nodes of 16 ranks.")
    add("z", float, 0.67, "Planner", "Standard deviations in the risk of a rank's load; 0: mean only.")
    add("tol", float, 0.01, "Planner", "A layer whose peak is within this of the average is left alone.")
    add("gate", float, 0.01, "Planner", "A layer changes only if its peak over average falls by more.")
    add("max_move_frac", float, 0.25, "Planner", "Most moves per layer and plan, as a part of its slots.")
    add("forecaster", str, "backtest", "Planner", "How loads are forecast; backtest takes the best.", metavar="NAME")
    add("groups", int, 1, "Planner", "Expert groups of group-limited routing, for greedy.", min=1)
    add("seed", int, 0, "Planner", "Of the random policy and of made-up traces.", min=0)
    add("pin", list[str] | None, None, "Planner", "A slot that keeps its expert; repeat for several.",
        metavar="LAYER:RANK:SLOT")
    add("horizon_steps", int | None, None, "Costs",
        "Steps for which a new placement is expected to stay. Default: as many as it was planned from.", min=0,
        metavar="N")
    add("step_seconds", float, 0.05, "Costs", "Seconds of an engine step.")
    add("expert_share", float, 0.5, "Costs", "Part of a step that the experts take as they are placed now.")
    add("scheme", str | None, None, "Costs",
        "How expert weights are stored; refused if experts stored so cannot be moved.", metavar="NAME")
    add("d", int, 7168, "Costs", "Hidden size of the model.", "--d", min=1)
    add("f", int, 2048, "Costs", "Feed-forward size of an expert.", "--f", min=1)
    add("bytes_per_expert", int, 0, "Costs",
        "Bytes that move with an expert. Default: from --scheme, --d and --f.", min=0)
    add("staging", int, 0, "Costs",
        "Experts that a rank can hold beside its slots. Default: what the busiest layer needs.", min=0)
    add("link_share", float, 0.5, "Costs", "Part of a step in which links may carry experts.")
    return out


SHARED = _shared()
FEW_ROWS = 8            # so few rows are rather whole windows than engine steps
PARAMS = ("z", "tol", "gate", "max_move_frac", "forecaster", "groups", "seed", "step_seconds", "expert_share",
          "bytes_per_expert", "staging", "link_share")


def shared(run: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of `run`, and the shared ones, which `run` gets as a mapping in front."""
    own = list(inspect.signature(run).parameters.values())[1:]

    def command(**options: Any) -> None:
        run({n: options[n] for n in SHARED}, **{p.name: options[p.name] for p in own})

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    every = [*SHARED.values(), *keyword]
    command.__signature__ = inspect.Signature(every)      # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every}
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


class Given(NamedTuple):
    """The operands of the planner."""

    load: Any                           # int64 [rows, layers, experts]
    rows: int                           # from which one plan is made
    now: Any                            # formats.Map
    topology: Any
    params: Any


def params(o: Mapping[str, Any]) -> Any:
    """`Params` of the options; ConfigError or BalanceError with everything that does not hold."""
    from afl.dist.eplb.refusals import expert_bytes, require_movable
    from afl.dist.eplb.values import Params

    fields = {n: o[n] for n in PARAMS} | ({} if o["horizon_steps"] is None else {"horizon_steps": o["horizon_steps"]})
    if o["scheme"] is not None:
        require_movable(o["scheme"])
    if not fields["bytes_per_expert"]:
        fields["bytes_per_expert"] = expert_bytes(o["scheme"] or "w8a8_dynamic", o["d"], o["f"])
    pinned = set()
    for text in o["pin"] or ():
        parts = text.split(":")
        if len(parts) != 3 or not all(p.isdecimal() and len(p) < 10 for p in parts):
            raise ConfigError(f"--pin takes LAYER:RANK:SLOT, got {text!r}")
        pinned.add(tuple(map(int, parts)))
    return Params(**fields, pinned=frozenset(pinned))


def check_policies(names: list[str]) -> None:
    """ConfigError for the first name that is no policy."""
    for name in names:
        if name not in POLICIES:
            raise ConfigError(unknown("balancing policy", name, POLICIES))


def given(o: Mapping[str, Any], window: int | None = None, part: int = 1) -> Given:
    """Read what the options name.  A plan is made from `window` rows, by default from one `part`-th of the load."""
    p = params(o)
    import numpy as np

    from afl.dist.eplb import formats
    from afl.dist.eplb.values import Placement, Topology

    recorded = formats.read_placement(o["recorded_under"], o["ranks"]).placement if o["recorded_under"] else None
    parts = [_load(text, o["seed"], recorded) for text in o["load"]]
    if len({x.shape[1:] for x in parts}) > 1:
        sizes = (f"{name} has {x.shape[1]} layers of {x.shape[2]} experts" for name, x in zip(o["load"], parts))  # noqa: B905
        raise BadInput("parts of the load differ: " + ", ".join(sizes))
    load = np.concatenate(parts)
    _, layers, experts = load.shape
    if o["placement"]:
        now = formats.read_placement(o["placement"], o["ranks"])
        filled = int((now.placement.phys_to_log >= 0).sum(1).max())
        if o["slots"] not in (0, filled, now.placement.slots):
            raise BadInput(f"--slots is {o['slots']}, but {o['placement']} has {filled}")
    else:
        if not o["ranks"]:
            raise BadInput("give --ranks, or --placement with what is where now")
        _limit(experts, o["ranks"], o["slots"], layers)
        slots = o["slots"] or min((-(-experts // o["ranks"]) + 1) * o["ranks"], experts * o["ranks"])
        now = formats.Map(Placement.initial(layers, experts, slots, o["ranks"]), tuple(range(layers)))
    ranks = now.placement.ranks
    topology = formats.read_topology(o["topology"], ranks) if o["topology"] else Topology.regular(ranks)
    from afl.dist.eplb.plan import fits
    from afl.dist.eplb.values import LoadWindow

    fits(LoadWindow.of(load[:1]), now.placement, topology)
    rows = window or max(len(load) // part, 1)
    if o["horizon_steps"] is None and rows >= FEW_ROWS:
        p = attrs.evolve(p, horizon_steps=rows * o["window_steps"])
    return Given(load, rows, now, topology, p)


def _limit(experts: int, ranks: int, slots: int, layers: int) -> None:
    """Sizes that no machine has are mistakes; they would take all memory before anybody noticed."""
    bad = [f"{n} is {v:,}, at most {most:,}" for n, v, most in (
        ("--ranks", ranks, 1 << 16), ("--slots", slots, 1 << 24)) if v > most]
    if not bad and max(ranks * experts, slots) * layers > 1 << 31:
        bad.append(f"{layers} layers of {experts} experts on {ranks} ranks are too many to plan at once")
    if bad:
        raise BadInput(violations("sizes", bad))


def _load(text: str, seed: int, recorded: Any) -> Any:
    from afl.dist.eplb import formats

    if text.startswith(TRACE):
        return made_up(text, seed)
    return formats.read_load(text, recorded)


def made_up(text: str, seed: int) -> Any:
    """int [steps, layers, experts] of trace:NAME or trace:NAME,steps=..,layers=..,experts=..,tokens=..,topk=.. ."""
    from afl.dist.eplb import traces
    from afl.dist.eplb.arrays import fit_in_memory

    name, *pairs = text.removeprefix(TRACE).split(",")
    sizes = {"steps": 600, "layers": 8, "experts": 128, "tokens": 2048, "topk": 8}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in sizes:
            raise ConfigError(unknown("size of a trace", key, sizes))
        if not value.isdecimal() or not 0 < int(value[:10]) <= 1 << 20:
            raise ConfigError(f"{key} of a trace must be a whole number from 1 to {1 << 20}, got {value!r}")
        sizes[key] = int(value)
    fit_in_memory(sizes["steps"] * sizes["layers"] * sizes["experts"] * 24)
    if name not in traces.names():
        raise ConfigError(unknown("made-up trace", name, traces.names()))
    return traces.trace(name, **sizes, seed=seed).astype("int64")
