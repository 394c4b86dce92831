"""Files of expert loads and placements, all untrusted: sizes are checked before memory is taken, nothing is unpickled.

loads        .npz with `load`, .npy, .json, or a tensor saved by torch (.pt): counts [windows, layers, experts], or
             [layers, experts] as DeepSeek's balancer takes them; .json also as {layer: {expert: count}}.
             vLLM-Ascend's `moe_load` counts per slot, [layers, ranks, slots] or with windows in front; it needs the
             placement under which it was recorded.
placements   .npz with `phys_to_log` and `ranks`, or vLLM-Ascend's expert map (.json).
"""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from afl.dist.eplb.arrays import fit_in_memory, read_npy, read_npz
from afl.dist.eplb.load import read_counts
from afl.dist.eplb.torch_file import read_torch
from afl.dist.eplb.values import Links, Placement, Topology
from afl.errors import BalanceError, nearest, violations

JSON_BYTES = 1 << 28
KEYS = ("load", "logical_count", "weight", "moe_load")      # names of counts inside a file, in this order


@attrs.frozen(eq=False)
class Map:
    """A placement and the numbers that its layers have in the model."""

    placement: Placement
    layer_ids: tuple[int, ...]


def read_load(path: str | Path, recorded_under: Placement | None = None) -> np.ndarray:
    """int64 [windows, layers, experts]: token counts of logical experts from any of the formats above.

    `recorded_under`: the file counts per slot of this placement.  Raises `BalanceError` naming the file, or OSError.
    """
    path = Path(path)
    try:
        x = _counts(path)
        x = read_counts(x) if recorded_under is None else from_slots(x, recorded_under)
        if not len(x):
            raise BalanceError("there is no window in it")
        return x
    except BalanceError as e:
        raise BalanceError(f"{path}: {e}") from None


def _counts(path: Path) -> np.ndarray:
    kind = path.suffix.lower()
    if kind == ".npy":
        return read_npy(path)
    if kind == ".json":
        return _json_counts(_read_json(path))
    if kind == ".npz":
        return _pick(read_npz(path, KEYS))
    if kind in (".pt", ".pth"):
        found = read_torch(path, KEYS)
        return found if isinstance(found, np.ndarray) else _pick(found)
    raise BalanceError(f"loads are read from .npz, .npy, .json and .pt files, not from {kind or 'nameless ones'}")


def _pick(found: dict[str, np.ndarray]) -> np.ndarray:
    for name in KEYS:
        if name in found:
            return found[name]
    raise BalanceError(f"none of {', '.join(KEYS)} is in it, but {', '.join(sorted(found)) or 'nothing'}")


def from_slots(counts: Any, placement: Placement) -> np.ndarray:
    """int64 [windows, layers, experts] from counts per slot of a placement.

    `counts`: [layers, ranks, slots per rank], with windows in front, or with the last two axes as one.  Holes must have
    counted nothing.

    >>> from_slots(np.array([[[5, 1], [2, 4]]]), Placement([[0, 1, 2, 0]], 2)).tolist()
    [[[9, 1, 2]]]
    """
    x = np.asarray(counts)
    p, per_rank = placement, (placement.layers, placement.ranks, placement.slots_per_rank)
    if x.shape[-3:] == per_rank and x.ndim in (3, 4):
        x = x.reshape(*x.shape[:-2], -1)
    if x.ndim not in (2, 3) or x.shape[-2:] != (p.layers, p.slots):
        raise BalanceError(f"counts {list(np.shape(counts))} do not fit the placement that they were recorded under: "
                           f"expected [{', '.join(map(str, per_rank))}], with windows in front if there are several")
    x = read_counts(x)
    hole = p.phys_to_log < 0
    if (x[:, hole] != 0).any():
        raise BalanceError("a hole of the placement has tokens; it is not the one that they were recorded under")
    out = np.zeros((int(p.phys_to_log.max()) + 1, p.layers, len(x)), np.int64)
    layer, slot = np.nonzero(~hole)
    np.add.at(out, (p.phys_to_log[layer, slot], layer), x[:, layer, slot].T)
    return np.ascontiguousarray(out.T)


def _read_json(path: Path) -> Any:
    size = path.stat().st_size
    if size > JSON_BYTES:
        raise BalanceError(f"{size} bytes of JSON are too much, at most {JSON_BYTES}; save it as .npz")
    fit_in_memory(size * 12)            # Python objects are larger than their text
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise BalanceError(f"it is not JSON: {e}") from None


def _json_counts(j: Any) -> np.ndarray:
    if isinstance(j, dict):
        for name in KEYS:
            if name in j:
                return _json_counts(j[name])
        return _by_name(j)
    try:
        x = np.array(j)
    except (ValueError, OverflowError) as e:
        raise BalanceError(f"its lists do not make an array: {e}") from None
    if x.dtype.kind not in "iuf":
        raise BalanceError("it must hold numbers only, in lists of equal length")
    return x


def _by_name(j: dict[str, Any]) -> np.ndarray:
    """{layer: {expert: count}}; layers in order of their numbers, experts that are missing counted nothing."""
    try:
        rows = {int(layer): {int(e): n for e, n in row.items()} for layer, row in j.items()}
    except (ValueError, AttributeError):
        raise BalanceError(f"a JSON object must have one of the keys {', '.join(KEYS)}, or be "
                           "{layer number: {expert number: count}}") from None
    most = max((e for row in rows.values() for e in row), default=-1)
    least = min((e for row in rows.values() for e in row), default=0)
    if least < 0 or not 0 <= most < 1 << 20:
        raise BalanceError(f"expert numbers must be 0 or more and below {1 << 20}, got {least} to {most}")
    fit_in_memory(len(rows) * (most + 1) * 8)
    out = np.zeros((len(rows), most + 1))
    for i, layer in enumerate(sorted(rows)):
        for e, n in rows[layer].items():
            if isinstance(n, bool) or not isinstance(n, int | float):
                raise BalanceError(f"layer {layer}, expert {e}: {n!r} is not a number")
            out[i, e] = n
    return out


# ---- placements -----------------------------------------------------------------------------------------------------


def read_placement(path: str | Path, ranks: int = 0) -> Map:
    """A placement from .npz (`phys_to_log` int [layers, slots]; `ranks`, or the argument) or an expert map (.json).

    Raises `BalanceError` naming the file and all that is wrong in it, or OSError.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".json":
            found = from_map(_read_json(path))
        elif path.suffix.lower() == ".npz":
            a = read_npz(path, ("phys_to_log", "ranks", "layer_ids"))
            if "phys_to_log" not in a:
                raise BalanceError("there is no array phys_to_log in it")
            n = int(a["ranks"]) if "ranks" in a and a["ranks"].shape == () else ranks
            if n < 1:
                raise BalanceError("it does not say over how many ranks the slots are; give --ranks")
            p = Placement(a["phys_to_log"], n)
            ids = a.get("layer_ids", np.arange(p.layers))
            if ids.shape != (p.layers,):
                raise BalanceError(f"layer_ids {list(ids.shape)} for {p.layers} layers")
            found = Map(p, tuple(ids.tolist()))
        else:
            raise BalanceError("placements are read from .npz and .json files")
        if ranks not in (0, found.placement.ranks):
            raise BalanceError(f"it is for {found.placement.ranks} ranks, not {ranks}")
    except BalanceError as e:
        raise BalanceError(f"{path}: {e}") from None
    return found


def write_placement(path: str | Path, found: Map) -> None:
    """The inverse of `read_placement`; the ending chooses the format."""
    path, p = Path(path), found.placement
    if path.suffix.lower() == ".json":
        path.write_text(json.dumps(to_map(found), indent=1) + "\n")
    elif path.suffix.lower() == ".npz":
        with path.open("wb") as f:
            np.savez(f, phys_to_log=p.phys_to_log, ranks=np.int64(p.ranks), layer_ids=np.array(found.layer_ids))
    else:
        raise BalanceError(f"{path}: placements are written to .npz or .json files")


def to_map(found: Map) -> dict[str, Any]:
    """vLLM-Ascend's expert map; holes are left out."""
    p = found.placement
    return {"moe_layer_count": p.layers, "layer_list": [
        {"layer_id": i, "device_count": p.ranks, "device_list": [
            {"device_id": r, "device_expert": [e for e in slots if e >= 0]} for r, slots in enumerate(rows)]}
        for i, rows in zip(found.layer_ids, p.by_rank.tolist(), strict=True)]}


def from_map(j: Any) -> Map:
    """A placement from vLLM-Ascend's expert map; devices of unequal size get holes.  Raises `BalanceError`.

    >>> from_map(to_map(Map(Placement([[0, 1, 1, -1]], 2), (3,)))).placement.phys_to_log.tolist()
    [[0, 1, 1, -1]]
    """
    bad: list[str] = []
    layers = j.get("layer_list") if isinstance(j, dict) else None
    if not isinstance(layers, list) or not layers or not all(isinstance(x, dict) for x in layers):
        raise BalanceError("an expert map is an object with a list layer_list of objects")
    if not _whole(j.get("moe_layer_count", len(layers))) or j.get("moe_layer_count", len(layers)) != len(layers):
        bad.append(f"moe_layer_count is {j['moe_layer_count']}, layer_list has {len(layers)} entries")
    rows: dict[int, list[list[int]]] = {}
    for n, x in enumerate(layers):
        where, devices = f"layer_list[{n}]", x.get("device_list")
        if not _whole(x.get("layer_id")) or x["layer_id"] in rows:
            bad.append(f"{where}: layer_id must be a whole number that occurs once, got {x.get('layer_id')!r}")
            continue
        if not isinstance(devices, list) or not all(isinstance(d, dict) for d in devices) or not devices:
            bad.append(f"{where}: device_list must be a list of objects")
            continue
        held = {d.get("device_id"): d.get("device_expert") for d in devices if _whole(d.get("device_id"))}
        if sorted(held) != list(range(len(devices))) or x.get("device_count", len(devices)) != len(devices):
            bad.append(f"{where}: device_id must be 0 to {len(devices) - 1}, device_count {len(devices)}")
            continue
        if not all(isinstance(e, list) and all(_whole(i) and i < 1 << 20 for i in e) for e in held.values()):
            bad.append(f"{where}: device_expert must be lists of expert numbers")
            continue
        rows[x["layer_id"]] = [held[r] or [] for r in range(len(devices))]
    ranks = {len(r) for r in rows.values()}
    width = max((len(e) for r in rows.values() for e in r), default=0)
    if len(ranks) > 1:
        bad.append(f"layers have different numbers of devices: {sorted(ranks)}")
    elif rows and width == 0:
        bad.append("no device has an expert")
    if bad:
        raise BalanceError(violations("expert map", bad))
    fit_in_memory(len(rows) * max(ranks) * width * 4)
    out = np.full((len(rows), max(ranks), width), -1, np.int32)
    for i, layer in enumerate(sorted(rows)):
        for r, held in enumerate(rows[layer]):
            out[i, r, :len(held)] = held
    return Map(Placement(out.reshape(len(rows), -1), max(ranks)), tuple(sorted(rows)))


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


# ---- topology -------------------------------------------------------------------------------------------------------


def read_topology(path: str | Path, ranks: int) -> Topology:
    """A topology from JSON: {"ranks_per_node": 16} or {"node": [...], "die_pair": [...]}, with "bytes_per_s":
    {"same_die", "same_node", "cross_node"} if it is not the default.  Raises `BalanceError`, or OSError."""
    path = Path(path)
    try:
        j = _read_json(path)
        if not isinstance(j, dict):
            raise BalanceError("a topology is a JSON object")
        links, bad = j.get("bytes_per_s", {}), []
        for known, given in ((("ranks_per_node", "node", "die_pair", "bytes_per_s"), j), (Links._fields, links)):
            if not isinstance(given, dict):
                raise BalanceError("bytes_per_s must be an object")
            bad += [f"unknown key {k!r}" + (f"; did you mean {near[0]!r}?" if (near := nearest(k, known)) else "")
                    for k in given if k not in known]
        bad += [f"bytes_per_s.{k} must be a number, got {v!r}" for k, v in links.items()
                if isinstance(v, bool) or not isinstance(v, int | float)]
        per_node = j.get("ranks_per_node", 16)
        if not _whole(per_node) or per_node < 1:
            bad.append(f"ranks_per_node must be a whole number above 0, got {per_node!r}")
        for k in ("node", "die_pair"):
            if k in j and not (isinstance(j[k], list) and len(j[k]) == ranks and all(map(_whole, j[k]))):
                bad.append(f"{k} must be a list of {ranks} whole numbers, one per rank")
        if bad:
            raise BalanceError(violations("topology", bad))
        plain = Topology.regular(ranks, ranks_per_node=per_node)
        return Topology(ranks, j.get("node", plain.node), j.get("die_pair", plain.die_pair), Links(**links))
    except (OverflowError, BalanceError) as e:
        raise BalanceError(f"{path}: {e}") from None
