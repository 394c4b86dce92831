"""Policies on a recorded load: plan from one window, look at the next, go on from there."""

import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from afl.dist.eplb import policies
from afl.dist.eplb.metrics import shares, step_par, window_par
from afl.dist.eplb.plan import plan
from afl.dist.eplb.values import LoadWindow, Params, Placement, Plan, Topology
from afl.errors import BalanceError


@attrs.frozen(eq=False)
class Cycle:
    """A plan and what became of it in the window behind the one it was made from."""

    plan: Plan | None                   # None: nothing was planned
    placement: Placement                # during the evaluated window
    par: np.ndarray                     # float64 [layers], of the window's sums
    row_par: np.ndarray                 # float64 [layers], mean over the window's rows
    slowdown: float                     # time of the experts over what a perfect split would take, over all rows
    seconds: float                      # wall time of planning


@attrs.frozen(eq=False)
class Outcome:
    """A policy over a whole trace."""

    policy: str
    cycles: tuple[Cycle, ...]

    def figures(self) -> dict[str, float | int | str]:
        """One row of a comparison; sums over cycles, except where the name says otherwise."""
        plans = [c.plan for c in self.cycles if c.plan is not None]
        par, rows = (np.stack([getattr(c, n) for c in self.cycles]) for n in ("par", "row_par"))
        return {
            "policy": self.policy, "par_mean": float(par.mean()), "par_worst": float(par.max()),
            "row_par_mean": float(rows.mean()), "row_par_worst": float(rows.max()),
            "slowdown": float(np.mean([c.slowdown for c in self.cycles])),
            "moves": sum(len(r) for p in plans for r in p.rounds), "bytes": sum(p.bytes for p in plans),
            "rounds": sum(len(p.rounds) for p in plans), "seconds": sum(p.seconds for p in plans),
            "planning_seconds": sum(c.seconds for c in self.cycles),
        }


def window_of(counts: np.ndarray, steps: int = 1) -> LoadWindow:
    """The load window of rows [rows, layers, experts] that each sum `steps` steps."""
    w = LoadWindow.of(counts)
    return attrs.evolve(w, steps=w.steps * steps, block_steps=w.block_steps * steps, half_life=w.half_life * steps)


def cut(counts: np.ndarray, rows: int) -> list[np.ndarray]:
    """Consecutive windows of `rows` rows; a rest at the end is dropped.  `BalanceError` if there is no whole one."""
    if not 1 <= rows <= len(counts):
        raise BalanceError(f"a window of {rows} rows cannot be cut from a load of {len(counts)}; "
                           f"give --window between 1 and {len(counts)}")
    return [counts[i:i + rows] for i in range(0, len(counts) - rows + 1, rows)]


def run(policy: str | None, windows: Sequence[np.ndarray], placement: Placement, topology: Topology, params: Params,
        steps: int = 1, seen: Callable[[Cycle], None] = lambda c: None) -> Outcome:
    """A policy (None: never plan) over windows [rows, layers, experts]; a single window is evaluated on itself."""
    cycles = []
    pairs = list(zip(windows, windows[1:], strict=False)) or [(windows[0], windows[0])]
    rebalance = policies.load(policy) if policy is not None else None
    for past, future in pairs:
        start, made = time.perf_counter(), None
        if rebalance is not None:
            made = plan(window_of(past, steps), placement, topology, params, rebalance)
            placement = made.placement
        seconds = time.perf_counter() - start
        cycles.append(Cycle(made, placement, window_par(future, placement), step_par(future, placement),
                            slowdown(future, placement), seconds))
        seen(cycles[-1])
    return Outcome(policy or "none", tuple(cycles))


def slowdown(counts: np.ndarray, placement: Placement) -> float:
    """Sum over rows and layers of the slowest rank's load, over that of the average rank's; 1 without load."""
    part, peak, mean = shares(placement, counts.shape[-1]), 0.0, 0.0
    for layer in range(len(part)):
        loads = counts[:, layer].astype(np.float64) @ part[layer].T        # [rows, ranks]
        peak, mean = peak + float(loads.max(-1).sum()), mean + float(loads.mean(-1).sum())
    return peak / mean if mean > 0 else 1.0
