"""Expert placements planned by greedy, flash and afl on invented traces, against the project's targets.

Three windows of 600 steps: plan 1 from window 0 is judged on window 1; plan 2, from window 1 and the layout of plan 1,
on window 2.  Figures are means over layers and over both plans, then medians over seeds; seconds are process time (one
core), the least over seeds.  One parameter set throughout.  All of it takes about half an hour; --quick is one seed of
two sizes, cut to 16 layers, without the verdicts on time.  --json prints the figures as one line of JSON at the end.
"""

import argparse
import json
import statistics
import time

import attrs

from afl.dist.eplb import metrics, policies, traces
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology

STEPS, SEEDS = 600, 5
PARAMS = Params(z=0.67, max_move_frac=1.0, horizon_steps=STEPS)
SIZES = {                       # name -> layers, experts, ranks (as many spare slots), tokens per step
    "8+8": (48, 128, 8, 2048), "16+16": (48, 128, 16, 2048),
    "32+32": (58, 256, 32, 4096), "64+64": (58, 256, 64, 8192), "128+128": (58, 256, 128, 16384),
}
POLICIES = ("greedy", "flash", "afl")
SECONDS = {"32+32": 2.0, "64+64": 2.0, "128+128": 5.0}
MEAN_ONLY_SECONDS = {"32+32": 0.3, "64+64": 0.3}
# what the reference measured, (size, trace, policy, figure) -> value
REFERENCE = {
    ("32+32", "zipf", "greedy", "par"): 1.004, ("32+32", "zipf", "flash", "par"): 1.004,
    ("32+32", "lognormal", "greedy", "par"): 1.025, ("32+32", "lognormal", "flash", "par"): 1.028,
    ("32+32", "drift", "greedy", "par"): 1.618, ("32+32", "drift", "flash", "par"): 1.533,
    ("32+32", "bursty", "greedy", "step_par"): 1.880, ("32+32", "bursty", "flash", "step_par"): 1.610,
    ("32+32", "lognormal", "greedy", "moves_1"): 16106, ("32+32", "lognormal", "flash", "moves_1"): 13502,
    ("32+32", "lognormal", "greedy", "moves_2"): 15345, ("32+32", "lognormal", "flash", "moves_2"): 13072,
    ("64+64", "drift", "greedy", "par"): 2.142, ("64+64", "drift", "flash", "par"): 1.915,
    ("128+128", "drift", "greedy", "par"): 2.800, ("128+128", "drift", "flash", "par"): 2.563,
}


def measure(size: str, trace: str, seed: int, layers: int | None) -> dict[str, dict[str, float]]:
    """Policy -> figures of both plans on one trace."""
    full, experts, ranks, tokens = SIZES[size]
    counts = traces.trace(trace, steps=3 * STEPS, layers=layers or full, experts=experts, tokens=tokens, seed=seed)
    part = [counts[i * STEPS:(i + 1) * STEPS] for i in range(3)]
    windows = [LoadWindow.of(p, capacity=STEPS) for p in part[:2]]
    topology = Topology.regular(ranks)
    contenders = {p: (p, PARAMS) for p in POLICIES} | {"afl z=0": ("afl", attrs.evolve(PARAMS, z=0.0))}
    out = {}
    for label, (policy, params) in contenders.items():
        rebalance = policies.load(policy)
        now = Placement.initial(counts.shape[1], experts, experts + ranks, ranks)
        rows = []
        for i in (0, 1):
            a = time.process_time()
            new = rebalance(windows[i], now, topology, params)
            seconds = time.process_time() - a
            found = new.check(experts)
            assert not found, found
            rows.append((metrics.window_par(part[i + 1], new), metrics.step_par(part[i + 1], new),
                         metrics.moves(now, new), seconds))
            now = new
        out[label] = {
            "par": float((rows[0][0].mean() + rows[1][0].mean()) / 2),
            "worst_par": float(max(r[0].max() for r in rows)),
            "step_par": float((rows[0][1].mean() + rows[1][1].mean()) / 2),
            "moves_1": rows[0][2], "moves_2": rows[1][2], "seconds_1": rows[0][3], "seconds_2": rows[1][3],
        }
    return out


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians over seeds; the least of the seconds."""
    return {k: (min if k.startswith("seconds") else statistics.median)([r[k] for r in runs]) for k in runs[0]}


Table = dict[tuple[str, str, str], dict[str, float]]        # (size, trace, policy) -> figures


def verdicts(t: Table, timed: bool) -> list[tuple[str, float, float]]:
    """(target, figure, at most) for every target that the table can judge."""
    out = []
    for size in [s for s in SIZES if ("layers", s, "") in t]:
        layers, experts, ranks, _ = SIZES[size]
        afl, flash, greedy = ({n: t[size, n, p] for n in traces.names()} for p in ("afl", "flash", "greedy"))
        if size in SECONDS:
            factor = 0.9 if ranks == 128 else 1.05
            out.append((f"{size} drift: PAR - 1 over flash's", (afl["drift"]["par"] - 1) / (flash["drift"]["par"] - 1),
                        factor))
        out.append((f"{size} bursty: PAR of a step over flash's",
                    afl["bursty"]["step_par"] / flash["bursty"]["step_par"], 1.02))
        for n in ("zipf", "lognormal", "flat"):
            out.append((f"{size} {n}: PAR over the better of flash and greedy",
                        afl[n]["par"] - min(flash[n]["par"], greedy[n]["par"]), 0.01))
        if ranks == 32:
            out.append((f"{size} lognormal: first moves over flash's",
                        afl["lognormal"]["moves_1"] / flash["lognormal"]["moves_1"], 0.65))
        out += [(f"{size} {n}: second moves, part of slots",
                 afl[n]["moves_2"] / (t["layers", size, ""]["n"] * (experts + ranks)), 0.05) for n in ("zipf", "flat")]
        if timed and size in SECONDS:
            out.append((f"{size} slowest plan, s", max(afl[n]["seconds_1"] for n in afl), SECONDS[size]))
        if timed and size in MEAN_ONLY_SECONDS:
            z0 = max(t[size, n, "afl z=0"]["seconds_1"] for n in traces.names())
            out.append((f"{size} slowest mean-only plan, s", z0, MEAN_ONLY_SECONDS[size]))
    return out


def behind(t: Table, timed: bool) -> list[str]:
    """Where afl does not beat flash: PAR of windows and of steps (ties are within 0.001), first moves, seconds."""
    out = []
    for size, n in {(s, n): None for s, n, p in t if p == "afl"}:
        a, f = t[size, n, "afl"], t[size, n, "flash"]
        figures = [("par", 0.001), ("step_par", 0.001), ("moves_1", 0)] + [("seconds_1", 0)] * timed
        out += [f"{size} {n} {k}: {a[k]:.4g} against {f[k]:.4g}" for k, tie in figures if a[k] > f[k] + tie]
    return out


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--quick", action="store_true")
    args.add_argument("--json", action="store_true")
    args.add_argument("--sizes", default="")
    args.add_argument("--seeds", type=int, default=0)
    o = args.parse_args()
    sizes = o.sizes.split(",") if o.sizes else ["8+8", "32+32"] if o.quick else list(SIZES)
    seeds, layers = o.seeds or (1 if o.quick else SEEDS), 16 if o.quick else None
    measure("8+8", "drift", 0, 2)                                               # compile
    t: Table = {}
    print(f"{'size':8} {'trace':10} {'policy':8} {'PAR':>7} {'worst':>7} {'step':>7} {'moves 1':>8} {'moves 2':>8} "
          f"{'s 1':>6} {'s 2':>6}")
    for size in sizes:
        for n in traces.names():
            runs = [measure(size, n, seed, layers) for seed in range(seeds)]
            for p in runs[0]:
                r = t[size, n, p] = summary([run[p] for run in runs])
                print(f"{size:8} {n:10} {p:8} {r['par']:7.4f} {r['worst_par']:7.4f} {r['step_par']:7.4f} "
                      f"{r['moves_1']:8.0f} {r['moves_2']:8.0f} {r['seconds_1']:6.2f} {r['seconds_2']:6.2f}",
                      flush=True)
    if not o.quick:
        for (size, n, p, k), value in REFERENCE.items():
            if size in sizes:
                got = t[size, n, p][k]
                print(f"{'ok  ' if abs(got / value - 1) <= 0.03 else 'OFF '} reference {size} {n} {p} {k}: {got:.4g}, "
                      f"sheet {value:.4g} ({got / value - 1:+.1%})")
    counted = {("layers", s, ""): {"n": float(layers or SIZES[s][0])} for s in sizes}
    found = verdicts(t | counted, not o.quick)
    for target, got, most in found:
        print(f"{'ok  ' if got <= most else 'MISS'} {target}: {got:.3f} (at most {most})")
    late = behind(t, not o.quick)
    print("\n".join(["afl behind flash in:", *late]) if late else "afl is nowhere behind flash")
    if o.json:
        print(json.dumps({"figures": {" ".join(k): v for k, v in t.items()},
                          "targets": [{"target": a, "got": b, "at_most": c} for a, b, c in found], "behind": late}))
    raise SystemExit(any(got > most for _, got, most in found))


if __name__ == "__main__":
    main()
