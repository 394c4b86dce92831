"""Data-parallel ranks that meet in every layer: a rank admits only what does not make the others wait.

Every rank sees the same `Peers` (all ranks' running and waiting counts and blocks held, one exchange per step, also
from idle ranks), so all come to the same conclusion.

balance        "any_at_cap": nobody admits while some rank runs max_seqs requests
               "quota": a rank admits while it runs no more than the least busy rank that has work waiting
               "load": a rank admits while its blocks, with the candidate's, are at most those of the mean of the busy
               ranks, plus the slack; a rank that runs nothing, or the only one with work waiting, is free to admit
balance_slack  requests ("quota") or blocks ("load") by which a rank may be ahead
"""

from afl.sched import notes
from afl.sched.policies.registry import register
from afl.sched.policy import Verdict

notes.TEXT["balance"] = "its rank is at {a}, the others let it reach {b}"
KINDS = ("any_at_cap", "quota", "load")


def observe(value, s, event, params):
    """Remember the newest exchange."""
    return event if type(event).__name__ == "Peers" else value


def admit(c, params):
    """Object while this rank is ahead of the others."""
    peers = c.s.learned.get("balance")
    if peers is None or len(peers.running) < 2:
        return None
    cap, slack = c.s.config.max_seqs, params["balance_slack"]
    if params["balance"] == "any_at_cap":
        return Verdict("balance", max(peers.running), cap) if max(peers.running) >= cap else None
    if params["balance"] == "load":
        return _load(c, peers, slack)
    behind = [r for r, w in zip(peers.running, peers.waiting, strict=True) if w]
    most = min(behind, default=cap) + slack
    return Verdict("balance", c.running, most) if c.running > most else None


def _load(c, peers, slack):
    busy = [load for load, n in zip(peers.load, peers.running, strict=True) if n]
    others = any(w for rank, w in enumerate(peers.waiting) if rank != peers.rank)
    if not c.running or not others or len(busy) < 2:
        return None
    used, most = c.s.config.blocks - c.spare + c.blocks, sum(busy) / len(busy) + slack
    return Verdict("balance", used, most) if used > most else None


def rules(policy, params):
    """The kind is known."""
    return [] if params["balance"] in KINDS else [f"balance is {params['balance']!r}; it can be {', '.join(KINDS)}"]


register("balance", observe=observe, admit=admit, rules=rules, params={"balance": "any_at_cap", "balance_slack": 0},
         needs=("peers",))
