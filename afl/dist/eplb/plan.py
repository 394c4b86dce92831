"""The planner as one pure call: loads and a placement in, a new placement and the way there out."""

import numpy as np

from afl.dist.eplb import policies
from afl.dist.eplb.diff import apply, settle
from afl.dist.eplb.forecast import choose
from afl.dist.eplb.metrics import par, rank_loads
from afl.dist.eplb.rounds import schedule, stages
from afl.dist.eplb.values import LoadWindow, Params, Placement, Plan, Topology
from afl.errors import BalanceError, CheckFailed, violations


def plan(window: LoadWindow, placement: Placement, topology: Topology, params: Params = Params(),  # noqa: B008
         policy: str | policies.Rebalance = "afl") -> Plan:
    """What a policy (a name, or its function) makes of the loads, with rounds, costs and the expected gain.

    Experts that stay on a rank keep their slot whatever the policy says.  No clock, no randomness, no I/O.
    Raises `BalanceError` for values that do not fit each other, `CheckFailed` if the policy breaks a placement.

    >>> w = LoadWindow.of(np.array([[[90, 132, 40, 61, 104, 165]]]))
    >>> now = Placement([[0, 1, 2, 3, 4, 5, 0, 1, 2]], 3)
    >>> p = plan(w, now, Topology.regular(3), policy=lambda *_: Placement([[5, 1, 4, 3, 4, 5, 0, 1, 2]], 3))
    >>> len(p.rounds), p.par_before.round(3).tolist(), p.par_after.round(3).tolist()
    (2, [1.672], [1.016])
    """
    fits(window, placement, topology)
    rebalance = policies.load(policy) if isinstance(policy, str) else policy
    new = settle(placement, rebalance(window, placement, topology, params))
    bad = new.check(window.experts)
    if bad:
        raise CheckFailed(violations(f"policy {policy} made a placement that is not valid, please report it", bad))
    load, _ = expected(window, params)
    before, after = (par(rank_loads(load, p)) for p in (placement, new))
    urgent = np.argsort(-(before - after) * load.sum(1), kind="stable")
    done = schedule(placement, new, topology, params, urgent.tolist())
    gain = params.horizon_steps * saved(load, before, after, params)
    return Plan(new, done.rounds, before, after, done.bytes, done.seconds, gain,
                _reasons(placement, new, before, after, params), done.commits, done.starts)


def fits(window: LoadWindow, placement: Placement, topology: Topology) -> None:
    """Raise `BalanceError` with everything that keeps these three from belonging together."""
    bad = [f"{what}: {got}" for what, wrong, got in (
        ("layers", window.layers != placement.layers, f"{window.layers} of loads, {placement.layers} of the placement"),
        ("ranks", topology.ranks != placement.ranks,
         f"{topology.ranks} of the topology, {placement.ranks} of the placement"),
    ) if wrong]
    if window.experts > placement.slots:
        bad.append(f"experts: {window.experts} in the loads, but only {placement.slots} slots; give more slots")
    bad = bad or placement.check(window.experts)
    if bad:
        raise BalanceError(violations("loads, placement and topology that do not fit", bad))


def expected(window: LoadWindow, params: Params) -> tuple[np.ndarray, tuple[str, ...]]:
    """Tokens per step that are expected to come, float64 [layers, experts], and the forecaster of each layer."""
    x = window.samples()
    ahead = max(round(params.horizon_steps / window.block_steps), 1)
    names, load = [], np.zeros(window.total.shape)
    for layer in range(window.layers):
        rows = np.ascontiguousarray(x[:, layer])
        if rows.any():
            name, (load[layer], _) = choose(rows, ahead, params.forecaster)
            names.append(name)
        else:
            names.append("none")
    return load, tuple(names)


def saved(load: np.ndarray, before: np.ndarray, after: np.ndarray, params: Params) -> float:
    """Seconds per step: the ranks wait for the slowest one in every layer, so its load is the layer's time."""
    mean = load.sum(1)
    if not (mean * before).sum() > 0:
        return 0.0
    part = 1 - float((mean * after).sum() / (mean * before).sum())
    return params.step_seconds * params.expert_share * part


def _reasons(old: Placement, new: Placement, before: np.ndarray, after: np.ndarray, params: Params) -> tuple[str, ...]:
    moved = (old.phys_to_log != new.phys_to_log).sum(1)
    out = []
    for n, b, a in zip(moved.tolist(), before.tolist(), after.tolist(), strict=True):
        if n:
            out.append(f"peak over average {b:.3f} -> {a:.3f} by moving {n} expert{'s' if n > 1 else ''}")
        elif b <= 1 + params.tol:
            out.append(f"left alone: peak over average {b:.3f} is within {params.tol:g} of even")
        else:
            out.append(f"left alone at {b:.3f}: nothing that is allowed lowers it enough")
    return tuple(out)


def faults(plan: Plan, now: Placement, experts: int) -> list[str]:
    """Everything wrong with a plan for `now`, by carrying it out on labels: what a machine must never be given.

    Checked are shapes, numbers of sends and receives, sources, staged copies, and every placement on the way.
    """
    n = len(plan.rounds)
    if not n == len(plan.commits) == len(plan.starts):
        return [f"{n} rounds, {len(plan.commits)} commits and {len(plan.starts)} starts"]
    if (plan.placement.ranks, plan.placement.phys_to_log.shape) != (now.ranks, now.phys_to_log.shape):
        return ["its placement has another shape"]
    every = np.array([(i, *t) for i, r in enumerate(plan.rounds) for t in r], np.int64).reshape(-1, 7)
    limits = np.array([n, now.layers, experts, now.ranks, now.slots_per_rank, now.ranks, now.slots_per_rank])
    bad = [f"round {t[0]}: {t[1:]} is out of range" for t in every[((every < 0) | (every >= limits)).any(1)].tolist()]
    if bad:
        return bad
    bad += [f"rounds {i} and {i + 1} start out of order" for i in range(n - 1) if plan.starts[i] > plan.starts[i + 1]]
    for i, (r, ready) in enumerate(zip(plan.rounds, stages(plan.rounds, plan.commits), strict=True)):
        bad += [f"round {i}: rank {x} {verb} twice" for verb, k in (("sends", 2), ("receives", 4))
                for x in {t[k] for t in r} if sum(t[k] == x for t in r) > 1]
        bad += [f"round {i}: {t} copies a slot that holds {now.by_rank[t.layer, t.src_rank, t.src_slot]}" for t in r
                if now.by_rank[t.layer, t.src_rank, t.src_slot] != t.expert]
        if ready:
            if i + 1 < n and plan.starts[i + 1] <= plan.starts[i]:
                bad.append(f"round {i + 1} starts before round {i} has committed")
            now = apply(now, ready)
            changed = Placement(now.phys_to_log[list(plan.commits[i])], now.ranks)
            bad += [f"after round {i}, of the layers {plan.commits[i]}: {b}" for b in changed.check(experts)]
    if now != plan.placement:
        bad.append("its rounds do not lead to its placement")
    return bad
