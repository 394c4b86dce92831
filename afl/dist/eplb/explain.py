"""Why the experts of a layer move, or stay: forecast, risk of the ranks before and after, gain against cost."""

from typing import Any

import attrs
import numpy as np

from afl.dist.eplb.metrics import par, shares
from afl.dist.eplb.plan import expected, plan, saved
from afl.dist.eplb.policies import Rebalance
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology, Transfer


@attrs.frozen(eq=False)
class Side:
    """A layer's ranks under one placement, over the blocks of the load."""

    par: float                          # of the forecast
    risk: np.ndarray                    # float64 [ranks]: forecast plus z standard deviations, over the average
    count: np.ndarray                   # int64 [experts], replicas


@attrs.frozen(eq=False)
class Explanation:
    """What is known of one layer after planning."""

    layer: int
    policy: str
    reason: str
    forecaster: str
    forecast: np.ndarray                # float64 [experts], tokens per step
    before: Side
    after: Side
    moves: tuple[Transfer, ...]
    replaced: tuple[int, ...]           # the expert that each move overwrites
    gain_seconds: float                 # over the horizon
    cost_seconds: float                 # of link time, if its transfers went one by one
    params: Params

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "layer": self.layer, "policy": self.policy, "reason": self.reason, "forecaster": self.forecaster,
            "forecast": self.forecast.tolist(), "gain_seconds": self.gain_seconds, "cost_seconds": self.cost_seconds,
            "before": {"par": self.before.par, "risk": self.before.risk.tolist(), "count": self.before.count.tolist()},
            "after": {"par": self.after.par, "risk": self.after.risk.tolist(), "count": self.after.count.tolist()},
            "moves": [{**m._asdict(), "replaces": e} for m, e in zip(self.moves, self.replaced, strict=True)],
        }

    def text(self) -> str:
        """For people."""
        a, b, total = self.before, self.after, max(self.forecast.sum(), 1e-300)
        rows = [f"layer {self.layer}, policy {self.policy}: {self.reason}",
                f"forecast by {self.forecaster}: {self.forecast.sum():.1f} tokens per step over all experts", "",
                "hottest experts       share of load   replicas"]
        for e in np.argsort(-self.forecast, kind="stable")[:8].tolist():
            then = f" -> {b.count[e]}" if b.count[e] != a.count[e] else ""
            rows.append(f"  expert {e:<12} {self.forecast[e] / total:>13.2%}   {a.count[e]}{then}")
        rows += ["", f"ranks by risk (forecast + {self.params.z:g} standard deviations, 1 is the average load)",
                 f"  before   {_list(a.risk)}", f"  after    {_list(b.risk)}", ""]
        for m, e in zip(self.moves, self.replaced, strict=True):
            rows.append(f"  expert {m.expert} ({self.forecast[m.expert] / total:.2%} of the load) from rank "
                        f"{m.src_rank} to rank {m.dst_rank}, slot {m.dst_slot}, in place of expert {e}")
        rows.append(f"gain {self.gain_seconds:.3f} s over {self.params.horizon_steps} steps against "
                    f"{self.cost_seconds:.3f} s of link time, shared by the ranks that transfer at the same time")
        return "\n".join(rows) + "\n"


def _list(risk: np.ndarray) -> str:
    order = np.argsort(-risk, kind="stable")
    some = [f"rank {r} {risk[r]:.3f}" for r in order[:4]]
    return ", ".join(some) + (f", ..., rank {order[-1]} {risk[order[-1]]:.3f}" if len(order) > 4 else "")


def explain(window: LoadWindow, placement: Placement, topology: Topology, params: Params, policy: str | Rebalance,
            layer: int) -> Explanation:
    """Plan all layers, since they share costs, and look at one; raises what `plan` raises."""
    made = plan(window, placement, topology, params, policy)
    load, names = expected(window, params)
    moves = tuple(t for r in made.rounds for t in r if t.layer == layer)
    alone = np.where(np.arange(len(load)) == layer, made.par_after, made.par_before)   # as if only this layer changed
    gain = params.horizon_steps * saved(load, made.par_before, alone, params)
    rows = window.samples()[:, layer]
    before, after = (_side(p, load[layer], rows, params, layer) for p in (placement, made.placement))
    return Explanation(
        layer, policy if isinstance(policy, str) else "given", made.reasons[layer], names[layer], load[layer], before,
        after, moves, tuple(int(placement.by_rank[layer, m.dst_rank, m.dst_slot]) for m in moves),
        gain,
        sum(params.bytes_per_expert / topology.bytes_per_s_between(m.src_rank, m.dst_rank) for m in moves), params)


def _side(placement: Placement, load: np.ndarray, rows: np.ndarray, params: Params, layer: int) -> Side:
    one = Placement(placement.phys_to_log[layer:layer + 1], placement.ranks)
    part = shares(one, len(load))[0]
    y = part @ load
    average = y.mean()
    std = (rows @ part.T).std(0) if len(rows) else np.zeros(len(part))
    risk = (y + params.z * std) / average if average > 0 else np.ones(len(part))
    return Side(float(par(y)), risk, one.counts(len(load))[0])
