"""Planner jobs and plans as bytes: one line of JSON, then the arrays it lists.  Data only: nothing is unpickled."""

import json
from typing import Any

import attrs
import numpy as np

from afl.dist.eplb.values import Links, LoadWindow, Params, Placement, Plan, Topology, Transfer
from afl.errors import BalanceError

_DTYPES = ("int32", "int64", "float64")


def pack(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """A message; `head` must be JSON."""
    named = {n: [str(a.dtype), list(a.shape)] for n, a in arrays.items()}
    line = json.dumps({**head, "arrays": named}).encode() + b"\n"
    return line + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Head and arrays of a message; `BalanceError` for anything else."""
    try:
        line, at = data[:data.index(b"\n")], data.index(b"\n") + 1
        head = json.loads(line)
        arrays = {}
        for name, (dtype, shape) in head.pop("arrays").items():
            whole = all(isinstance(n, int) and 0 <= n < 1 << 31 for n in shape)
            if dtype not in _DTYPES or len(shape) > 3 or not whole:
                raise ValueError(f"array {name} is {dtype} {shape}")
            size = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
            if at + size > len(data):
                raise ValueError(f"array {name} ends after the message")
            arrays[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, at).reshape(shape)
            at += size
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes too many")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BalanceError(f"a message of the planner that cannot be read: {e}") from None
    return head, arrays


def pack_job(window: LoadWindow, placement: Placement, topology: Topology, params: Params, policy: str) -> bytes:
    """What a planner process needs."""
    blocks = np.stack(window.blocks) if window.blocks else np.zeros((0, *window.total.shape))
    scalars = {n: getattr(window, n) for n in ("steps", "start", "block_steps", "capacity", "half_life")}
    head = {"window": scalars, "ranks": placement.ranks, "links": list(topology.bytes_per_s), "policy": policy,
            "params": {**attrs.asdict(params), "pinned": sorted(params.pinned)}}
    return pack(head, {"total": window.total, "blocks": blocks, "ewma_sum": window.ewma_sum,
                       "phys_to_log": placement.phys_to_log, "node": topology.node, "die_pair": topology.die_pair})


def unpack_job(data: bytes) -> tuple[LoadWindow, Placement, Topology, Params, str]:
    """The arguments of `plan`."""
    h, a = unpack(data)
    window = LoadWindow(a["total"], tuple(a["blocks"]), a["ewma_sum"], **h["window"])
    params = Params(**{**h["params"], "pinned": frozenset(map(tuple, h["params"]["pinned"]))})
    topology = Topology(h["ranks"], a["node"], a["die_pair"], Links(*h["links"]))
    return window, Placement(a["phys_to_log"], h["ranks"]), topology, params, h["policy"]


def pack_plan(p: Plan) -> bytes:
    """A plan; it is what the planning rank sends to the others, too."""
    rows = np.array([(i, *t) for i, r in enumerate(p.rounds) for t in r], np.int32).reshape(-1, 7)
    commits = np.array([(i, x) for i, c in enumerate(p.commits) for x in c], np.int32).reshape(-1, 2)
    head = {"ranks": p.placement.ranks, "rounds": len(p.rounds), "bytes": p.bytes, "seconds": p.seconds,
            "gain_seconds": p.gain_seconds, "reasons": list(p.reasons)}
    return pack(head, {"phys_to_log": p.placement.phys_to_log, "transfers": rows, "commits": commits,
                       "starts": np.array(p.starts, np.int32), "before": p.par_before, "after": p.par_after})


def unpack_plan(data: bytes) -> Plan:
    """The plan of a message; `BalanceError` if it is none."""
    h, a = unpack(data)
    try:
        n = h["rounds"]
        rounds: list[list[Transfer]] = [[] for _ in range(len(a["starts"]))]
        commits: list[list[int]] = [[] for _ in range(len(a["starts"]))]
        for i, *t in a["transfers"].tolist():
            rounds[i].append(Transfer(*t))
        for i, layer in a["commits"].tolist():
            commits[i].append(layer)
        if n != len(rounds):
            raise ValueError(f"{n} rounds, {len(rounds)} starts")
        return Plan(Placement(a["phys_to_log"], h["ranks"]), tuple(map(tuple, rounds)), a["before"], a["after"],
                    h["bytes"], h["seconds"], h["gain_seconds"], tuple(h["reasons"]), tuple(map(tuple, commits)),
                    tuple(a["starts"].tolist()))
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise BalanceError(f"a plan that cannot be read: {type(e).__name__}: {e}") from None
