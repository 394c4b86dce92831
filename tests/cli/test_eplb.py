"""`afl eplb`: from a recorded load to a placement in one command; hostile input is one message and status 2."""

import json
import re
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from afl.dist.eplb.formats import read_placement
from afl.dist.eplb.metrics import par, rank_loads
from afl.dist.eplb.values import Placement

RNG = np.random.default_rng(5)
LOAD = RNG.poisson(RNG.lognormal(4, 1, (3, 16)), (24, 3, 16))
COMMANDS = ("plan", "compare", "explain", "sim")


@pytest.fixture
def load(tmp_path):
    np.savez(tmp_path / "load.npz", load=LOAD)
    return tmp_path / "load.npz"


def after(placement):
    return par(rank_loads(LOAD.sum(0).astype(float), placement))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(afl, command):
    text = afl("eplb", command, "--help").stdout
    assert len(re.findall(r"^ +afl eplb .*\w", text, re.M)) >= 2
    for option in ("--load", "--ranks", "--slots", "--placement", "--topology", "--staging", "--scheme", "--json"):
        assert option in text, option


def test_help_of_the_group_shows_each_command(afl):
    text = afl("eplb", "--help").stdout
    assert all(f"afl eplb {c}" in text for c in COMMANDS)
    assert "afl eplb plan" in afl("--help").stdout


def test_a_recorded_load_becomes_a_placement_in_one_command(afl, load, tmp_path):
    out = tmp_path / "placement.npz"
    result = afl("eplb", "plan", "--load", load, "--ranks", 4, "--slots", 20, "--policy", "afl", "--out", out)
    assert result.exit_code == 0, result.stderr
    with np.load(out) as a:
        assert a["phys_to_log"].dtype == np.int32 and a["phys_to_log"].shape == (3, 20)
    p = read_placement(out).placement
    assert p.ranks == 4 and p.check(16) == []
    assert after(p).mean() < after(Placement.initial(3, 16, 20, 4)).mean() - 0.05
    assert "written to" in result.stdout and "peak over average" in result.stdout


def test_plans_go_on_from_a_placement_and_keep_the_expert_maps_layer_numbers(afl, load, tmp_path):
    now, new = tmp_path / "now.json", tmp_path / "new.json"
    rows = Placement.initial(3, 16, 18, 4).by_rank.tolist()
    now.write_text(json.dumps({"moe_layer_count": 3, "layer_list": [
        {"layer_id": 3 + i, "device_count": 4, "device_list": [
            {"device_id": r, "device_expert": [e for e in held if e >= 0]} for r, held in enumerate(ranks)]}
        for i, ranks in enumerate(rows)]}))
    found = json.loads(afl("eplb", "plan", "--load", load, "--placement", now, "--out", new, "--json").stdout)
    assert found["ranks"] == 4 and found["slots"] == 18 and found["moves"] > 0
    j = json.loads(new.read_text())
    assert [x["layer_id"] for x in j["layer_list"]] == [3, 4, 5]
    assert [len(d["device_expert"]) for d in j["layer_list"][0]["device_list"]] == [5, 5, 4, 4]
    again = json.loads(afl("eplb", "plan", "--load", load, "--placement", new, "--json").stdout)
    assert again["par_before_mean"] == pytest.approx(found["par_after_mean"])


def test_recorded_counts_per_slot(afl, tmp_path):
    p = Placement.initial(3, 16, 20, 4)
    per_slot = np.zeros((3, 20), int)
    for layer, s in np.ndindex(3, 20):
        e = p.phys_to_log[layer, s]
        per_slot[layer, s] = 2 * LOAD.sum(0)[layer, e] // (p.phys_to_log[layer] == e).sum()
    np.save(tmp_path / "moe_load.npy", per_slot.reshape(3, 4, 5))
    np.savez(tmp_path / "now.npz", phys_to_log=p.phys_to_log, ranks=4)
    np.savez(tmp_path / "total.npz", load=2 * LOAD.sum(0, keepdims=True))
    how = ("--placement", tmp_path / "now.npz", "--policy", "greedy", "--json")
    a = afl("eplb", "plan", "--load", tmp_path / "moe_load.npy", "--recorded-under", tmp_path / "now.npz", *how)
    b = afl("eplb", "plan", "--load", tmp_path / "total.npz", *how)
    assert a.exit_code == 0 and json.loads(a.stdout) == json.loads(b.stdout)


@pytest.mark.parametrize(("rows", "more", "steps"), [
    (24, (), 24), (24, ("--window-steps", 10), 240), (2, (), 3000), (24, ("--horizon-steps", 7), 7),
])
def test_a_placement_is_expected_to_stay_as_long_as_it_was_planned_from(afl, tmp_path, rows, more, steps):
    np.save(tmp_path / "load.npy", LOAD[:rows])
    result = afl("eplb", "plan", "--load", tmp_path / "load.npy", "--ranks", 4, "--policy", "greedy", "--json", *more)
    assert json.loads(result.stdout)["horizon_steps"] == steps


def test_compare_shows_every_policy_and_no_planning(afl, load):
    result = afl("eplb", "compare", "--load", load, "--ranks", 4, "--policies", "greedy,afl", "--json")
    rows = {r["policy"]: r for r in json.loads(result.stdout)}
    assert list(rows) == ["none", "greedy", "afl"]
    assert rows["none"]["moves"] == rows["none"]["bytes"] == 0
    for name in ("greedy", "afl"):
        r = rows[name]
        assert r["par_mean"] < rows["none"]["par_mean"] and r["row_par_mean"] < rows["none"]["row_par_mean"]
        assert r["par_worst"] >= r["par_mean"] and r["row_par_worst"] >= r["row_par_mean"] >= r["par_mean"]
        assert r["bytes"] == r["moves"] * 44_085_248 and 0 < r["rounds"] <= r["moves"] and r["seconds"] > 0
    first = LOAD[8:16].sum(0).astype(float), LOAD[16:24].sum(0).astype(float)
    want = np.mean([par(rank_loads(x, Placement.initial(3, 16, 20, 4))).mean() for x in first])
    assert rows["none"]["par_mean"] == pytest.approx(want)
    text = afl("eplb", "compare", "--load", load, "--ranks", 4, "--policies", "greedy").stdout
    assert text.splitlines()[0].split()[:3] == ["policy", "window", "mean"] and len(text.splitlines()) == 3


def test_one_window_is_judged_by_itself_and_that_is_said(afl, tmp_path):
    np.save(tmp_path / "one.npy", LOAD.sum(0))
    result = afl("eplb", "compare", "--load", tmp_path / "one.npy", "--ranks", 4, "--policies", "greedy")
    assert result.exit_code == 0 and "one window only" in result.stderr


def test_sim_adds_up_over_windows(afl, load):
    how = ("eplb", "sim", "--load", load, "--ranks", 4, "--window", 4, "--policy", "greedy")
    found = json.loads(afl(*how, "--json").stdout)
    cycles, total = found["cycles"], found["total"]
    assert [c["window"] for c in cycles] == [1, 2, 3, 4, 5] and total["windows"] == 5
    assert cycles[-1]["bytes_so_far"] == sum(c["bytes"] for c in cycles) == total["bytes"]
    assert total["moves"] == sum(c["moves"] for c in cycles)
    assert 1 <= total["slowdown"] < total["slowdown_none"]
    now, peak, mean = Placement.initial(3, 16, 20, 4), 0.0, 0.0
    for row in LOAD[4:].astype(float):
        loads = rank_loads(row, now)
        peak, mean = peak + loads.max(-1).sum(), mean + loads.mean(-1).sum()
    assert total["slowdown_none"] == pytest.approx(peak / mean)
    assert cycles[-1]["saved"] == pytest.approx(1 - total["slowdown"] / total["slowdown_none"])
    assert afl(*how).stdout.splitlines()[-1].startswith("slowdown ")


def test_explain_gives_reasons_moves_gain_and_cost(afl, load):
    how = ("eplb", "explain", "--load", load, "--ranks", 4, "--layer", 1)
    found = json.loads(afl(*how, "--json").stdout)
    assert found["layer"] == 1 and found["moves"] and found["gain_seconds"] > 0 and found["cost_seconds"] > 0
    assert found["after"]["par"] < found["before"]["par"]
    assert sum(found["before"]["count"]) == sum(found["after"]["count"]) == 20
    text = afl(*how).stdout
    assert "hottest experts" in text and f"expert {found['moves'][0]['expert']} (" in text and "against" in text


def test_a_trace_can_be_made_up(afl):
    how = ("--ranks", 4, "--policies", "greedy", "--json")
    result = afl("eplb", "compare", "--load", "trace:zipf,steps=30,layers=2,experts=16,tokens=64,topk=2", *how)
    assert result.exit_code == 0 and json.loads(result.stdout)[1]["par_mean"] > 1


def test_parts_of_a_trace_are_joined(afl, tmp_path):
    np.save(tmp_path / "a.npy", LOAD[:10])
    np.save(tmp_path / "b.npy", LOAD[10:])
    np.save(tmp_path / "c.npy", LOAD[:, :2])
    np.save(tmp_path / "all.npy", LOAD)
    how = ("--ranks", 4, "--policy", "greedy", "--json")
    a = afl("eplb", "plan", "--load", tmp_path / "a.npy", "--load", tmp_path / "b.npy", *how)
    assert a.stdout == afl("eplb", "plan", "--load", tmp_path / "all.npy", *how).stdout
    bad = afl("eplb", "plan", "--load", tmp_path / "a.npy", "--load", tmp_path / "c.npy", *how)
    assert bad.exit_code == 2 and "parts of the load differ" in bad.stderr


def test_nothing_of_torch_is_imported(load, tmp_path):
    code = ("import sys, afl_cli.main as m\n"
            "try: m.main()\nexcept SystemExit as e: print(e.code, sorted({'torch', 'sympy'} & set(sys.modules)))")
    for command, more in (("plan", ["--out", str(tmp_path / "p.npz"), "--png", str(tmp_path / "p.png")]),
                          ("compare", ["--policies", "greedy"])):
        run = [sys.executable, "-c", code, "eplb", command, "--load", str(load), "--ranks", "4", *more]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    for words in (["--help"], ["plan", "--help"]):
        code = ("import sys, afl_cli.main as m\ntry: m.main()\nexcept SystemExit: pass\n"
                "print(sorted({'torch', 'numba', 'numpy', 'scipy'} & set(sys.modules)))")
        done = subprocess.run([sys.executable, "-c", code, "eplb", *words], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "[]"


# ---- pictures -------------------------------------------------------------------------------------------------------


def pixels(data):
    """The image of a PNG as uint8 [rows, columns, 3]; every checksum is verified."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, size = 8, b"", None
    while at < len(data):
        n, kind = struct.unpack(">I4s", data[at:at + 8])
        part = data[at + 8:at + 8 + n]
        assert struct.unpack(">I", data[at + 8 + n:at + 12 + n])[0] == zlib.crc32(kind + part)
        if kind == b"IHDR":
            size = struct.unpack(">IIBBBBB", part)
        body += part if kind == b"IDAT" else b""
        at += 12 + n
    assert size is not None and size[2:] == (8, 2, 0, 0, 0) and kind == b"IEND"
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(size[1], -1)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:].reshape(size[1], size[0], 3)


class Page(HTMLParser):
    """Counts tags and keeps what they say."""

    def __init__(self):
        super().__init__()
        self.tags, self.words = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(k in ("src", "href", "onload") for k, _ in attrs)

    def handle_data(self, data):
        self.words.append(data)


def test_heat_maps_before_and_after(afl, load, tmp_path):
    png, html = tmp_path / "p.png", tmp_path / "p.html"
    result = afl("eplb", "plan", "--load", load, "--ranks", 4, "--policy", "greedy", "--png", png, "--html", html)
    assert result.exit_code == 0
    image = pixels(png.read_bytes())
    cell, (top, left) = 24, (6 + 32, 8)
    before = rank_loads(LOAD.sum(0).astype(float), Placement.initial(3, 16, 20, 4))
    hot = np.unravel_index((before / before.mean(1, keepdims=True)).argmax(), before.shape)
    tint = image[top + hot[0] * cell + 5, left + hot[1] * cell + 5]
    assert tint[0] > tint[1] and tint[0] > tint[2], "more than the average is red"
    half = image.shape[1] // 2
    ink = 255 - image[top:-6].astype(int)
    assert ink[:, left:half].sum() > 2 * ink[:, half:].sum(), "after is whiter"
    page = Page()
    page.feed(html.read_text())
    assert page.tags.count("figure") == 2 and page.tags.count("rect") == 2 * 3 * 4
    assert any(w.startswith("before: peak over average") for w in page.words)
    assert any(f"{before[0, 0]:.0f} tokens" in w for w in page.words)


def test_a_comparison_has_a_picture_per_policy_and_its_table(afl, load, tmp_path):
    png, html = tmp_path / "c.png", tmp_path / "c.html"
    how = ("--ranks", 4, "--policies", "greedy", "--png", png, "--html", html)
    assert afl("eplb", "compare", "--load", load, *how).exit_code == 0
    page = Page()
    page.feed(html.read_text())
    assert page.tags.count("figure") == 2 and page.tags.count("tr") == 3
    assert pixels(png.read_bytes()).shape[2] == 3


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "said"), [
    ([], "give --ranks"),
    (["--ranks", 4, "--slots", 12], "12 slots cannot hold 16 experts"),
    (["--ranks", 4, "--slots", 80], "at most 64 slots"),
    (["--ranks", 1 << 40], "at most 65,536"),
    (["--ranks", 4, "--policy", "gredy"], "did you mean 'greedy'"),
    (["--ranks", 4, "--z", "nan"], "z must be a number"),
    (["--ranks", 4, "--step-seconds", "inf"], "step_seconds must be a number"),
    (["--ranks", 4, "--link-share", 2, "--tol", -1], "2 problems"),
    (["--ranks", 4, "--pin", "1:2"], "LAYER:RANK:SLOT"),
    (["--ranks", 4, "--pin", "9:0:0"], "does not exist"),
    (["--ranks", 4, "--scheme", "w4a4_flatquant"], "no part of it that is one expert"),
    (["--ranks", 4, "--scheme", "w8a8"], "unknown weight scheme"),
    (["--ranks", 4, "--forecaster", "crystal"], "unknown forecaster"),
    (["--ranks", 4, "--out", "x.csv"], "must end in .npz or .json"),
    (["--ranks", 4, "--out", "/nowhere/at/all/x.npz"], "there is no folder"),
    (["--ranks", 4, "--topology", "/nowhere/t.json"], "/nowhere/t.json"),
    (["--ranks", 4, "--placement", "/nowhere/p.json"], "/nowhere/p.json"),
    (["--ranks", 4, "--load", "/nowhere/l.npz"], "/nowhere/l.npz"),
    (["--ranks", 4, "--load", "trace:zipff"], "did you mean 'zipf'"),
    (["--ranks", 4, "--load", "trace:zipf,step=3"], "did you mean 'steps'"),
    (["--ranks", 4, "--load", "trace:zipf,steps=0"], "whole number from 1"),
    (["--ranks", 4, "--load", "trace:zipf,steps=1048576,experts=1048576"], "bytes of memory"),
    (["--ranks", 4, "--load", "trace:zipf,experts=4"], "topk"),
    (["--rank", 4], "--ranks"),
])
def test_bad_options_are_one_message_and_status_2(afl, load, more, said):
    result = afl("eplb", "plan", "--load", load, *more)
    assert result.exit_code == 2 and said in result.stderr and not result.stdout, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("x", [
    np.array([[[1.0, np.nan]]]), np.array([[[1, -1]]]), np.zeros((2, 2, 2, 2)), np.zeros(3), np.zeros((1, 0, 4)),
    np.array([[[1 << 62, 1]]]), np.zeros((0, 2, 4)), np.array([["a"]]), np.array([[[0.5, 1]]]),
])
def test_bad_loads_are_one_message_and_status_2(afl, tmp_path, x):
    np.savez(tmp_path / "load.npz", load=x)
    for command in COMMANDS:
        more = ["--layer", 0] if command == "explain" else []
        result = afl("eplb", command, "--load", tmp_path / "load.npz", "--ranks", 2, *more)
        assert result.exit_code == 2 and result.stderr.startswith("afl: error: ") and not result.stdout, result.stderr


def test_a_placement_for_other_experts_is_refused(afl, load, tmp_path):
    np.savez(tmp_path / "p.npz", phys_to_log=Placement.initial(2, 16, 20, 4).phys_to_log, ranks=4)
    result = afl("eplb", "plan", "--load", load, "--placement", tmp_path / "p.npz")
    assert result.exit_code == 2 and "3 of loads, 2 of the placement" in result.stderr
    np.savez(tmp_path / "p.npz", phys_to_log=np.zeros((3, 20), int), ranks=4)
    result = afl("eplb", "plan", "--load", load, "--placement", tmp_path / "p.npz")
    assert result.exit_code == 2 and "experts are on no rank" in result.stderr


@pytest.mark.parametrize("load", [np.zeros((4, 2, 8), int), np.ones((4, 2, 1), int), np.ones((1, 1, 8), int) << 40])
@pytest.mark.parametrize("ranks", [1, 3])
def test_odd_loads_still_give_valid_plans(afl, tmp_path, load, ranks):
    np.savez(tmp_path / "load.npz", load=load)
    for policy in ("afl", "greedy"):
        out = tmp_path / f"{policy}.npz"
        how = ("--ranks", ranks, "--policy", policy, "--out", out)
        result = afl("eplb", "plan", "--load", tmp_path / "load.npz", *how)
        assert result.exit_code == 0, result.stderr
        assert read_placement(out).placement.check(load.shape[2]) == []
