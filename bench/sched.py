"""Host cost of the scheduler: decode steps, admissions, aborts, long queues; against another scheduler if one is there.

    python bench/sched.py [--json] [--busy-ok] [--against "PYTHON SCRIPT"]

A decode step is a result event, stop checks, outputs and the next plan, prefix cache on, block 128, prompts of 1024.
Pinned to one core; p50 of 300 steps.  Targets: 256 running 150 us, 1024 running 400 us; admission of an 8k prompt
300 us, with its hashing counted at arrival.  SCRIPT is run as `PYTHON SCRIPT --n N --steps 300 --kinds decode` between
two runs of ours and prints a JSON line with "caching" and "total_us_p50" per configuration.
"""

import argparse
import gc
import json
import os
import shlex
import statistics
import subprocess
import time

import numpy as np
from machine import require_idle

from afl.sched import Aborted, Arrived, Policy, Request, Sampled, SchedConfig, init, on_event, schedule, step

BLOCK, PROMPT, STEPS = 128, 1024, 300
TARGETS = {64: None, 256: 150.0, 1024: 400.0}
FCFS = Policy()


def config_of(rows: int, blocks: int) -> SchedConfig:
    return SchedConfig(rows, max(8192, rows), 65536, blocks, BLOCK, prefix_cache=True)


def running(n: int, waiting: int = 0):
    """A state in which n requests decode and `waiting` wait, and its plan in flight."""
    s = init(config_of(n, n * (PROMPT + STEPS + 300) // BLOCK + n + 64))
    rng = np.random.default_rng(0)
    new = [Arrived(Request(str(i), rng.integers(3, 32000, PROMPT), STEPS + 200)) for i in range(n)]
    s, plan, _ = step(s, new, FCFS)
    while len(s.running) < n or (s.sched[s.running] < PROMPT).any():
        s, plan, _ = step(s, [result(plan)], FCFS)
    same = rng.integers(3, 32000, 64)
    s, plan, _ = step(s, [result(plan), *(Arrived(Request(f"w{i}", same, 20)) for i in range(waiting))], FCFS)
    for _ in range(20):
        s, plan, _ = step(s, [result(plan)], FCFS)
    gc.collect()
    return s, plan


def result(plan) -> Sampled:
    return Sampled(plan.step, np.full(len(plan.rows), 7, np.int32))


def decode_us(n: int, waiting: int = 0) -> dict[str, float]:
    """p50 and quietest of 300 decode steps."""
    s, plan = running(n, waiting)
    times = []
    for _ in range(STEPS):
        events = [result(plan)]
        a = time.perf_counter()
        s, plan, _ = step(s, events, FCFS)
        times.append((time.perf_counter() - a) * 1e6)
        assert len(plan.rows) == n
    return {"step_us": statistics.median(times), "quietest_us": min(times)}


def admission_us(cached: bool) -> dict[str, float]:
    """Arrival (hashing) and admission of an 8k prompt, whose prefix is in the cache or not; medians of 40."""
    rng, arrive, admit = np.random.default_rng(1), [], []
    s = init(config_of(64, 4096))
    prompt = rng.integers(3, 32000, 8191)
    for i in range(45):
        r = Request(str(i), prompt if cached else rng.integers(3, 32000, 8191), 1)
        a = time.perf_counter()
        s, _ = on_event(s, Arrived(r))
        b = time.perf_counter()
        s, plan = schedule(s, FCFS)
        c = time.perf_counter()
        arrive.append((b - a) * 1e6)
        admit.append((c - b) * 1e6)
        assert plan is not None and plan.tokens == (8191 if i == 0 or not cached else 8191 - 8064)
        s, _ = on_event(s, result(plan))
    return {"arrive_us": statistics.median(arrive[5:]), "admit_us": statistics.median(admit[5:]),
            "quietest_us": min(admit[5:])}


def abort_us(waiting: int) -> dict[str, float]:
    """Giving up a running request, and a waiting one; medians of 100."""
    s, _ = running(256, waiting)
    names = {"running_us": [str(i) for i in range(100)], "waiting_us": [f"w{i}" for i in range(0, waiting // 3, 33)]}
    out = {}
    for what, ids in names.items():
        times = []
        for id in ids:
            a = time.perf_counter()
            s, _ = on_event(s, Aborted(id))
            times.append((time.perf_counter() - a) * 1e6)
        out[what] = statistics.median(times)
    return out


def theirs_us(command: str, n: int) -> float:
    """p50 of a decode step of the other scheduler, its prefix cache on."""
    done = subprocess.run([*shlex.split(command), "--n", str(n), "--steps", str(STEPS), "--kinds", "decode"],
                          capture_output=True, text=True, check=True)
    rows = [json.loads(r) for r in done.stdout.splitlines() if r.startswith("{")]
    return next(r["total_us_p50"] for r in rows if r["caching"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--busy-ok", action="store_true")
    parser.add_argument("--against", default="")
    args = parser.parse_args()
    require_idle()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows: dict[str, object] = {"decode": []}
    for n, target in TARGETS.items():
        ours = [decode_us(n)]
        theirs = theirs_us(args.against, n) if args.against else None
        ours.append(decode_us(n))
        row = {"running": n, **{k: min(o[k] for o in ours) for k in ours[0]}}
        if theirs is not None:
            row |= {"theirs_us": theirs, "times": theirs / row["step_us"]}
        rows["decode"].append(row)      # type: ignore[attr-defined]
        verdict = "" if target is None else "ok" if row["step_us"] <= target else f"OVER {target:.0f}"
        more = "" if theirs is None else f"   theirs {theirs:.0f} us, {row['times']:.1f} times"
        print(f"decode {n:5} running: {row['step_us']:7.1f} us (quietest {row['quietest_us']:.1f}) {verdict}{more}")
    rows["waiting"] = [{"waiting": w, **decode_us(256, w)} for w in (0, 10_000, 100_000)]
    for w in rows["waiting"]:           # type: ignore[attr-defined]
        print(f"256 running, {w['waiting']:6} waiting: {w['step_us']:7.1f} us (quietest {w['quietest_us']:.1f})")
    rows["admission"] = {"new": admission_us(False), "cached": admission_us(True)}
    for name, a in rows["admission"].items():       # type: ignore[attr-defined]
        print(f"8k prompt, {name}: arrival {a['arrive_us']:.0f} us, admission {a['admit_us']:.0f} us "
              f"(quietest {a['quietest_us']:.0f}; target 300)")
    rows["abort"] = abort_us(10_000)
    print("abort:", ", ".join(f"{k.removesuffix('_us')} {v:.0f} us" for k, v in abort_us(10_000).items()))
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
