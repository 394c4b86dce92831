"""Files of loads and placements: what is written by others is read, what is broken or hostile is one clear error."""

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
import torch
from arrangements import some_placement

from afl.dist.eplb import arrays
from afl.dist.eplb.formats import Map, from_map, from_slots, read_load, read_placement, read_topology, write_placement
from afl.dist.eplb.values import Placement
from afl.errors import BalanceError

LOAD = np.random.default_rng(0).integers(0, 1000, (3, 2, 7))


def written(path, kind):
    x = LOAD
    if kind == "npz":
        np.savez(path, load=x, other=np.zeros(3))
    elif kind == "packed npz":
        np.savez_compressed(path, load=x.astype(np.int32))
    elif kind == "npy":
        np.save(path, np.asfortranarray(x.astype(np.float64)))
    elif kind == "tensor":
        torch.save(torch.from_numpy(x.astype(np.float32)), path)
    elif kind == "view":
        torch.save(torch.from_numpy(np.ascontiguousarray(x.transpose(2, 0, 1))).permute(1, 2, 0), path)
    elif kind == "dict":
        torch.save({"rank": 0, "logical_count": torch.from_numpy(x.astype(np.int32)), "note": ["a", 1.5]}, path)
    elif kind == "lists":
        path.write_text(json.dumps(x.tolist()))
    elif kind == "weight":
        path.write_text(json.dumps({"weight": x.tolist(), "note": "x"}))
    return path


@pytest.mark.parametrize(("kind", "name"), [
    ("npz", "a.npz"), ("packed npz", "a.npz"), ("npy", "a.npy"), ("tensor", "a.pt"), ("view", "a.pt"),
    ("dict", "a.pth"), ("lists", "a.json"), ("weight", "a.json"),
])
def test_loads_of_every_format(tmp_path, kind, name):
    found = read_load(written(tmp_path / name, kind))
    assert found.dtype == np.int64 and (found == LOAD).all()


def test_one_window_as_layers_by_experts(tmp_path):
    np.save(tmp_path / "w.npy", LOAD[0])
    assert (read_load(tmp_path / "w.npy") == LOAD[:1]).all()


def test_counts_by_layer_and_expert_name(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"10": {"0": 5, "2": 7}, "3": {"1": 4}}))
    assert read_load(path).tolist() == [[[0, 4, 0], [5, 0, 7]]]


@pytest.mark.parametrize("shape", ["layers, ranks, slots", "windows", "flat", "windows, flat"])
def test_counts_per_slot_become_counts_per_expert(tmp_path, shape):
    rng = np.random.default_rng(2)
    p = some_placement(rng, 2, 5, 8, 3)                     # with a hole
    x = rng.integers(0, 100, (4, 2, 9)) * (p.phys_to_log >= 0)
    want = np.zeros((4, 2, 5), int)
    for t, layer, s in np.ndindex(x.shape):
        if p.phys_to_log[layer, s] >= 0:
            want[t, layer, p.phys_to_log[layer, s]] += x[t, layer, s]
    if "windows" not in shape:
        x, want = x[0], want[:1]
    if "flat" not in shape:
        x = x.reshape(*x.shape[:-1], 3, 3)
    np.savez(tmp_path / "m.npz", moe_load=x)
    assert (read_load(tmp_path / "m.npz", recorded_under=p) == want).all()


def test_counts_per_slot_that_do_not_fit_are_refused():
    p = Placement([[0, 1, 2, 0, 1, -1]], 2)
    with pytest.raises(BalanceError, match=r"expected \[1, 2, 3\]"):
        from_slots(np.zeros((1, 3, 2)), p)
    with pytest.raises(BalanceError, match="hole"):
        from_slots(np.ones((1, 2, 3)), p)


def bomb(path, compressed=True):
    """A .npz whose header promises 2 TB, and a member of 3 GB of zeros in a few MB."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<i8", "fortran_order": False, "shape": (1 << 38,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("load.npy", b"\x93NUMPY\x01\x00"[:8] + head.getvalue()[8:] + b"\0" * 1000)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def hostile(path, kind):
    if kind == "object array":
        np.savez(path, load=np.array([Evil()], dtype=object))
    elif kind == "object npy":
        np.save(path, np.array([[Evil()]], dtype=object), allow_pickle=True)
    elif kind == "promise":
        bomb(path)
    elif kind == "cut npz":
        np.savez(path, load=LOAD)
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "cut npy":
        np.save(path, LOAD)
        path.write_bytes(path.read_bytes()[:-20])
    elif kind in ("garbage", "empty"):
        path.write_bytes(b"\xff\x00PK" * 50 if kind == "garbage" else b"")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    elif kind == "evil torch":
        torch.save({"load": Evil()}, path)
    elif kind == "evil call":
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("a/data.pkl", pickle.dumps({"load": Evil()}, 2))
    elif kind == "odd instruction":
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("a/data.pkl", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85\x81.")
    elif kind == "short storage":
        torch.save(torch.ones(2, 3, 4), path)
        with zipfile.ZipFile(path) as z:
            parts = {n: z.read(n) for n in z.namelist()}
        with zipfile.ZipFile(path, "w") as z:
            for n, b in parts.items():
                z.writestr(n, b[:40] if n.endswith("data/0") else b)
    elif kind == "deep json":
        path.write_text("[" * 200_000)
    elif kind == "ragged":
        path.write_text("[[1, 2], [3]]")
    elif kind == "words":
        path.write_text('[["a", "b"]]')
    elif kind == "huge number":
        path.write_text("[[" + "9" * 400 + "]]")
    elif kind == "far expert":
        path.write_text('{"0": {"99999999999": 1}}')
    elif kind == "names":
        path.write_text('{"layers": {"x": 1}}')
    elif kind == "nothing":
        np.savez(path, hot=LOAD)
    elif kind == "nan":
        np.save(path, np.array([[1.0, np.nan]]))
    elif kind == "negative":
        np.save(path, -LOAD)
    elif kind == "fraction":
        np.save(path, LOAD / 7)
    elif kind == "five axes":
        np.save(path, np.zeros((1, 1, 1, 1, 2)))
    elif kind == "complex":
        np.save(path, np.zeros((1, 2), complex))
    return path


@pytest.mark.parametrize(("kind", "name", "said"), [
    ("object array", "a.npz", "nothing is unpickled"), ("object npy", "a.npy", "nothing is unpickled"),
    ("promise", "a.npz", "cut off"), ("cut npz", "a.npz", "not a .npz"), ("cut npy", "a.npy", "cut off"),
    ("garbage", "a.npz", "not a .npz"), ("garbage", "a.npy", "not an array"),
    ("garbage", "a.pt", "not a file of torch"), ("garbage", "a.json", "not JSON"),
    ("empty", "a.npz", "not a .npz"), ("empty", "a.npy", "not an array"),
    ("empty", "a.json", "not JSON"), ("pickle", "a.pt", "not a file of torch"), ("evil torch", "a.pt", "none of"),
    ("evil call", "a.pt", "none of"), ("odd instruction", "a.pt", "NEWOBJ, which no plain tensor needs"),
    ("short storage", "a.pt", "reaches to element 23 of 10"), ("deep json", "a.json", "not JSON"),
    ("ragged", "a.json", "do not make an array"), ("words", "a.json", "numbers only"),
    ("huge number", "a.json", ""), ("far expert", "a.json", "expert numbers"), ("names", "a.json", "layer number"),
    ("nothing", "a.npz", "but nothing"), ("nan", "a.npy", "not finite"), ("negative", "a.npy", "negative"),
    ("fraction", "a.npy", "whole number"), ("five axes", "a.npy", "numbers"), ("complex", "a.npy", "complex128"),
    ("nothing", "a.csv", "not from .csv"),
])
def test_broken_and_hostile_loads_are_one_clear_error(tmp_path, capfd, kind, name, said):
    with pytest.raises(BalanceError) as e:
        read_load(hostile(tmp_path / name, kind))
    assert said in str(e.value) and name in str(e.value) and "executed" not in capfd.readouterr().out


def test_sizes_are_checked_before_memory_is_taken(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", LOAD)
    np.savez(tmp_path / "a.npz", load=LOAD)
    torch.save(torch.from_numpy(LOAD), tmp_path / "a.pt")
    (tmp_path / "a.json").write_text(json.dumps(LOAD.tolist()))
    monkeypatch.setattr(arrays, "available_memory", lambda: LOAD.nbytes)
    for name in ("a.npy", "a.npz", "a.pt", "a.json"):
        with pytest.raises(BalanceError, match="bytes of memory"):
            read_load(tmp_path / name)


def test_a_tensor_file_cannot_make_the_reader_work_for_ever(tmp_path):
    doubling = b"\x80\x02" + b")" + b"".join(b"q%c" % i + b"h%ch%c\x86" % (i, i) for i in range(60))
    for tail in (b"}" + b"h\x00" + b"s.", b"\x85R.", b"."):
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as z:
            z.writestr("a/data.pkl", doubling + tail)
        with pytest.raises(BalanceError):
            read_load(tmp_path / "a.pt")


# ---- placements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p.npz", "p.json"])
@pytest.mark.parametrize("seed", range(5))
def test_placements_survive_their_files(tmp_path, name, seed):
    rng = np.random.default_rng(seed)
    p = some_placement(rng, 3, 7, 10, 4)
    write_placement(tmp_path / name, Map(p, (3, 4, 9)))
    found = read_placement(tmp_path / name)
    assert found.layer_ids == (3, 4, 9) and found.placement.ranks == 4
    for a, b in zip(p.by_rank.reshape(-1, 3), found.placement.by_rank.reshape(-1, 3), strict=True):
        assert [e for e in a if e >= 0] == [e for e in b if e >= 0]
    if name.endswith("npz"):
        assert found.placement == p


def test_the_expert_map_has_the_schema_of_the_reference(tmp_path):
    write_placement(tmp_path / "p.json", Map(Placement([[0, 1, 2, 0, 1, -1]], 2), (0,)))
    assert json.loads((tmp_path / "p.json").read_text()) == {"moe_layer_count": 1, "layer_list": [
        {"layer_id": 0, "device_count": 2, "device_list": [
            {"device_id": 0, "device_expert": [0, 1, 2]}, {"device_id": 1, "device_expert": [0, 1]}]}]}


def test_layers_and_devices_come_in_order_of_their_numbers():
    def layer(i, rows):
        devices = [{"device_id": r, "device_expert": rows[r]} for r in (1, 0)]
        return {"layer_id": i, "device_count": 2, "device_list": devices}

    found = from_map({"moe_layer_count": 2, "layer_list": [layer(5, [[0], [1]]), layer(2, [[1], [0]])]})
    assert found.layer_ids == (2, 5) and found.placement.phys_to_log.tolist() == [[1, 0], [0, 1]]


def test_everything_wrong_with_a_map_is_said_at_once():
    good = {"layer_id": 0, "device_count": 1, "device_list": [{"device_id": 0, "device_expert": [0]}]}
    with pytest.raises(BalanceError) as e:
        from_map({"moe_layer_count": 7, "layer_list": [
            good, good, {**good, "layer_id": "x"}, {**good, "layer_id": 3, "device_list": []},
            {**good, "layer_id": 4, "device_list": [{"device_id": 5, "device_expert": []}]},
            {**good, "layer_id": 6, "device_list": [{"device_id": 0, "device_expert": [True]}]}]})
    assert "6 problems" in str(e.value) and all(f"layer_list[{i}]" in str(e.value) for i in range(1, 6))


@pytest.mark.parametrize("j", [[], {}, {"layer_list": []}, {"layer_list": [1]}, {"layer_list": [{}]}, None, 3, {
    "layer_list": [{"layer_id": 0, "device_list": [{"device_id": [], "device_expert": None}]}]}, {
    "layer_list": [{"layer_id": 0, "device_list": [{"device_id": 0, "device_expert": []}]}]}, {
    "layer_list": [{"layer_id": 0, "device_list": [{"device_id": 0, "device_expert": [1 << 40]}]}]}])
def test_maps_that_are_none_are_refused(j):
    with pytest.raises(BalanceError):
        from_map(j)


def test_a_placement_without_ranks_asks_for_them(tmp_path):
    np.savez(tmp_path / "p.npz", phys_to_log=np.array([[0, 1, 2, 0]], np.int32))
    with pytest.raises(BalanceError, match="--ranks"):
        read_placement(tmp_path / "p.npz")
    assert read_placement(tmp_path / "p.npz", 2).placement.ranks == 2
    write_placement(tmp_path / "p.npz", Map(Placement([[0, 1]], 2), (0,)))
    with pytest.raises(BalanceError, match="2 ranks, not 3"):
        read_placement(tmp_path / "p.npz", 3)


def test_topologies(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"ranks_per_node": 2, "bytes_per_s": {"cross_node": 1e9}}')
    t = read_topology(path, 4)
    assert t.node.tolist() == [0, 0, 1, 1] and t.bytes_per_s.cross_node == 1e9 and t.bytes_per_s.same_die == 400e9
    path.write_text('{"node": [0, 1, 0, 1], "die_pair": [0, 1, 2, 3]}')
    assert read_topology(path, 4).node.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("text", "said"), [
    ("[]", "JSON object"), ('{"nodes": [0]}', "did you mean 'node'"), ('{"node": [0]}', "list of 2"),
    ('{"ranks_per_node": 0}', "above 0"), ('{"bytes_per_s": {"same_die": "fast"}}', "a number, got 'fast'"),
    ('{"bytes_per_s": {"same_die": -1}}', "above 0"), ('{"bytes_per_s": 3}', "an object"),
    ('{"node": [0, 99999999999]}', ""),
])
def test_topologies_that_do_not_hold(tmp_path, text, said):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(BalanceError) as e:
        read_topology(path, 2)
    assert said in str(e.value) and "t.json" in str(e.value)
