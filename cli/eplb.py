"""`afl eplb`: where to put experts, from recorded loads; no model, no device, no torch."""

import json as jsons
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from afl.errors import BadInput, ConfigError
from afl.run.amounts import size

from .eplb_options import POLICIES, check_policies, given, shared
from .run import Json
from .terminal import busy, say, write

HELP = """Balance experts over ranks, from recorded loads.

\b
  afl eplb plan --load load.npz --ranks 32 --slots 288 --out placement.npz
  afl eplb compare --load load.npz --ranks 32 --html compare.html
  afl eplb explain --load load.npz --ranks 32 --layer 7
  afl eplb sim --load load.npz --ranks 32 --window 600
  afl eplb compare --load trace:drift --ranks 8      nothing recorded yet? zipf, lognormal, drift, bursty, flat

A load is the number of tokens that each expert got: int64 [windows, layers, experts], called `load` in a .npz file; it
may also be .npy, .json or .pt. Nothing is moved: the result is a file that a server can start from.
"""
Options = Mapping[str, Any]
Policy = Annotated[str, typer.Option(
    "--policy", "-p", metavar="NAME", rich_help_panel="Planner", help=f"How to plan: {', '.join(POLICIES)}.")]
Policies = Annotated[str, typer.Option(
    "--policies", metavar="A,B", rich_help_panel="Planner", help="The policies to compare.")]
Out = Annotated[str | None, typer.Option(
    "--out", "-o", metavar="FILE", rich_help_panel="Output", show_default=False,
    help="Write the new placement: .npz with phys_to_log, or .json as vLLM-Ascend's expert map.")]
Png = Annotated[str | None, typer.Option(
    "--png", metavar="FILE", rich_help_panel="Output", show_default=False, help="Heat maps of rank loads as an image.")]
Html = Annotated[str | None, typer.Option(
    "--html", metavar="FILE", rich_help_panel="Output", show_default=False, help="Heat maps and figures as a page.")]


def _window(default: str) -> Any:
    return typer.Option("--window", metavar="N", rich_help_panel="Load", show_default=False, min=1,
                        help=f"Rows of the load that one plan is made from. Default: {default}.")


_ALL = ",".join(POLICIES)


def plan(o: Options, policy: Policy = "afl", out: Out = None, png: Png = None, html: Html = None,
         json: Json = False) -> None:
    """Plan a placement from a recorded load, and how to get there.

    \b
    Examples:
      afl eplb plan --load load.npz --ranks 32 --slots 288 --policy afl --out placement.npz
      afl eplb plan --load load.npz --placement now.json --out expert_map.json
      afl eplb plan --load moe_load.npy --recorded-under now.json --placement now.json --staging 2
    """
    check_policies([policy])
    _writable(out, (".npz", ".json"))
    with busy("planning"):
        g = given(o)
        from afl.dist.eplb import plan as planner
        from afl.dist.eplb.compare import window_of
        from afl.dist.eplb.metrics import rank_loads

        p = planner.plan(window_of(g.load, o["window_steps"]), g.now.placement, g.topology, g.params, policy)
    if out:
        from afl.dist.eplb.formats import Map, write_placement

        write_placement(out, Map(p.placement, g.now.layer_ids))
    total = g.load.sum(0, dtype="float64")
    _pictures(png, html, f"afl eplb plan --policy {policy}",
              [("before", rank_loads(total, g.now.placement)), ("after", rank_loads(total, p.placement))], ())
    changed = int((g.now.placement.phys_to_log != p.placement.phys_to_log).any(1).sum())
    found = {
        "policy": policy, "layers": g.load.shape[1], "experts": g.load.shape[2], "ranks": p.placement.ranks,
        "slots": int((p.placement.phys_to_log >= 0).sum(1).max()), "layers_changed": changed,
        "par_before_mean": float(p.par_before.mean()), "par_before_worst": float(p.par_before.max()),
        "par_after_mean": float(p.par_after.mean()), "par_after_worst": float(p.par_after.max()),
        "moves": sum(map(len, p.rounds)), "bytes": p.bytes, "rounds": len(p.rounds),
        "commits": sum(map(bool, p.commits)), "steps": p.starts[-1] + 1 if p.starts else 0, "seconds": p.seconds,
        "gain_seconds": p.gain_seconds, "horizon_steps": g.params.horizon_steps, "out": out,
    }
    if json:
        write(jsons.dumps({**found, "reasons": list(p.reasons)}) + "\n")
        return
    write(f"""{found['layers']} layers, {found['experts']} experts in {found['slots']} slots on {found['ranks']} ranks
peak over average     {found['par_before_mean']:.3f} -> {found['par_after_mean']:.3f} in the mean, \
{found['par_before_worst']:.3f} -> {found['par_after_worst']:.3f} in the worst layer, as forecast
changes               {changed} layers, {found['moves']} experts move, {size(p.bytes)}
transfers             {len(p.rounds)} rounds, {found['commits']} commits, {p.seconds:.2f} s of link time \
in {found['steps']} steps
expected gain         {p.gain_seconds:.2f} s over {g.params.horizon_steps} steps
""")
    write(f"written to            {out}\n" if out else "nothing was written: give --out FILE.npz or --out FILE.json\n")


def compare(
    o: Options, policies: Policies = _ALL,
    window: Annotated[int | None, _window("a third of the load")] = None,
    png: Png = None, html: Html = None, json: Json = False,
) -> None:
    """Compare policies: each plans from a window of the load and is judged by the next one.

    Peak over average of the next window's sums and of its single rows, mean and worst over layers; what the plans move.
    Everything is summed over the windows behind the first. `none` never plans. Planning time is wall time of this run.

    \b
    Examples:
      afl eplb compare --load load.npz --ranks 32
      afl eplb compare --load load.npz --ranks 32 --policies afl,flash --html compare.html --png compare.png
      afl eplb compare --load trace:bursty,steps=900,layers=4 --ranks 16 --json
    """
    names = [n.strip() for n in policies.split(",") if n.strip()]
    check_policies(names)
    g = given(o, window, part=3)
    from afl.dist.eplb.compare import cut, run

    windows = cut(g.load, g.rows)
    outcomes = []
    for name in [None, *names]:
        with busy(f"planning with {name}" if name else "looking at the load"):
            outcomes.append(run(name, windows, g.now.placement, g.topology, g.params, o["window_steps"]))
    rows = [x.figures() for x in outcomes]
    if len(windows) < 2:
        say("there is one window only: policies are judged by the load that they planned from", "note")
    table = _table(rows)
    _pictures(png, html, "afl eplb compare", [(x.policy, _last(x, windows)) for x in outcomes], table)
    if json:
        write(jsons.dumps(rows) + "\n")
        return
    write(_text(table))


def _last(outcome: Any, windows: Sequence[Any]) -> Any:
    from afl.dist.eplb.metrics import rank_loads

    return rank_loads(windows[-1].sum(0, dtype="float64"), outcome.cycles[-1].placement)


def sim(
    o: Options, policy: Policy = "afl",
    window: Annotated[int | None, _window("a tenth of the load")] = None, json: Json = False,
) -> None:
    """Plan again after every window of a long load: what the experts' time becomes, and what that moves.

    slowdown is the experts' time over that of a perfect split, row by row; `none` is the same without planning. The
    last two columns are cumulative: expert time saved against no planning, and bytes moved.

    \b
    Examples:
      afl eplb sim --load day.npz --ranks 32 --window 600
      afl eplb sim --load trace:drift,steps=3000,layers=4 --ranks 8 --policy flash --json
    """
    check_policies([policy])
    g = given(o, window, part=10)
    from afl.dist.eplb.compare import cut, run

    windows = cut(g.load, g.rows)
    if len(windows) < 2:
        raise BadInput(f"a load of {len(g.load)} rows has one window of {len(windows[0])}; give a longer load, "
                       "or a smaller --window")
    with busy("planning"):
        with_plans, without = (run(n, windows, g.now.placement, g.topology, g.params, o["window_steps"])
                               for n in (policy, None))
    rows, moved, times = [], 0, [0.0, 0.0]
    perfect = [float(w.sum(dtype="float64")) for w in windows[1:]]
    for i, (a, b) in enumerate(zip(with_plans.cycles, without.cycles, strict=True)):
        assert a.plan is not None
        moved += a.plan.bytes
        times = [times[0] + a.slowdown * perfect[i], times[1] + b.slowdown * perfect[i]]
        rows.append({
            "window": i + 1, "slowdown": a.slowdown, "slowdown_none": b.slowdown, "moves": sum(map(len, a.plan.rounds)),
            "bytes": a.plan.bytes, "rounds": len(a.plan.rounds), "seconds": a.plan.seconds,
            "saved": 1 - times[0] / times[1] if times[1] > 0 else 0.0, "bytes_so_far": moved,
        })
    whole = sum(perfect)
    end = {"policy": policy, "windows": len(rows), "slowdown": times[0] / whole if whole else 1.0,
           "slowdown_none": times[1] / whole if whole else 1.0, "bytes": moved,
           "moves": sum(r["moves"] for r in rows), "seconds": sum(r["seconds"] for r in rows)}
    if json:
        write(jsons.dumps({"cycles": rows, "total": end}) + "\n")
        return
    head = ("window", "slowdown", "none", "moves", "bytes", "rounds", "saved so far", "bytes so far")
    write(_text([head, *((
        str(r["window"]), f"{r['slowdown']:.3f}", f"{r['slowdown_none']:.3f}", str(r["moves"]), size(r["bytes"]),
        str(r["rounds"]), f"{r['saved']:.1%}", size(r["bytes_so_far"])) for r in rows)]))
    write(f"slowdown {end['slowdown']:.3f} with {policy}, {end['slowdown_none']:.3f} without; {end['moves']} experts, "
          f"{size(moved)} and {end['seconds']:.2f} s of link time moved\n")


def explain(
    o: Options, layer: Annotated[int, typer.Option(
        "--layer", metavar="N", min=0, help="Which layer, counted from 0 in the load.")],
    policy: Policy = "afl", json: Json = False,
) -> None:
    """Say why a layer's experts move, or stay: forecast, risk of the ranks before and after, gain against cost.

    \b
    Examples:
      afl eplb explain --load load.npz --ranks 32 --layer 7
      afl eplb explain --load load.npz --ranks 32 --layer 7 --policy swift --json
    """
    check_policies([policy])
    with busy("planning"):
        g = given(o)
        if layer >= g.load.shape[1]:
            raise ConfigError(f"--layer is {layer}, the load has layers 0 to {g.load.shape[1] - 1}")
        from afl.dist.eplb import explain as explaining
        from afl.dist.eplb.compare import window_of

        window = window_of(g.load, o["window_steps"])
        found = explaining.explain(window, g.now.placement, g.topology, g.params, policy, layer)
    write(jsons.dumps(found.record()) + "\n" if json else found.text())


# ---- output ---------------------------------------------------------------------------------------------------------


def _writable(path: str | None, endings: Sequence[str]) -> None:
    """Refuse an output file before the work, not behind it."""
    if path is not None and Path(path).suffix.lower() not in endings:
        raise BadInput(f"{path}: the file must end in {' or '.join(endings)}")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise BadInput(f"{path}: there is no folder {Path(path).absolute().parent}")


def _table(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    head = ("policy", "window mean", "worst", "row mean", "worst", "moves", "bytes", "rounds", "link s", "planning s")
    return [head, *((
        r["policy"], *(f"{r[n]:.3f}" for n in ("par_mean", "par_worst", "row_par_mean", "row_par_worst")),
        str(r["moves"]), size(r["bytes"]), str(r["rounds"]), f"{r['seconds']:.2f}", f"{r['planning_seconds']:.2f}")
        for r in rows)]


def _text(table: Sequence[Sequence[str]]) -> str:
    width = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, width, strict=True)))
             for row in table)
    return "".join(line.rstrip() + "\n" for line in lines)


def _pictures(png: str | None, html: str | None, title: str, loads: Sequence[tuple[str, Any]],
              table: Sequence[Sequence[str]]) -> None:
    if png is None and html is None:
        return
    from afl.dist.eplb import pictures

    panels = [pictures.Panel(name, x) for name, x in loads]
    if png is not None:
        Path(png).write_bytes(pictures.png(panels))
    if html is not None:
        Path(html).write_text(pictures.page(title, panels, table), encoding="utf-8")


COMMANDS = {"plan": shared(plan), "compare": shared(compare), "explain": shared(explain), "sim": shared(sim)}
