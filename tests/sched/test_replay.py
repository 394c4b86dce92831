"""A log executed again, under its own policy and under another; the trace; the command."""

import json
import subprocess
import sys

import numpy as np
import pytest
from sched_fakes import Run, expect_alone

from afl.errors import BadInput
from afl.sched import (
    EventLog,
    Grammar,
    Input,
    Policy,
    Request,
    SchedConfig,
    Tick,
    perfetto,
    policies,
    read,
    replay,
    whatif,
)
from afl.sched.log import decode, encode


@pytest.fixture(scope="module", params=[1, 2])
def logged(request, tmp_path_factory):
    """A run with preemptions, and its log."""
    path, policy = tmp_path_factory.mktemp("log") / "run.log", Policy()
    config = SchedConfig(5, 16, 40, 12, 3, prefix_cache=True)
    with EventLog(path, config, policy) as log:
        run = Run(config, request.param, policy, log)
        requests = [Request(f"r{i}", np.arange(3 + i) % 5, 6 + i, priority=-i, arrival=float(i)) for i in range(9)]
        for r in requests:
            run.submit(r)
        run.drain()
    expect_alone(run, requests)
    return path, run


def test_following_a_log_gives_the_states_of_the_run(logged):
    path, run = logged
    config, policy, batches = read(path)
    told = whatif.follow(config, policy, batches)
    assert told.state.digest() == run.state.digest() == replay(path).digest()
    assert set(told.finished()) == set(run.finish) and run.state.preemptions > 0
    assert whatif.first_difference(told, told) is None


@pytest.mark.parametrize("name", ["priority", "shortest", "decode_first", "watermark", "growth"])
def test_another_policy_delivers_the_same_tokens(logged, name):
    path, run = logged
    config, policy, batches = read(path)
    lists = list(batches)
    told = whatif.follow(config, policy, lists)
    other = whatif.another(config, policies.get(name), lists, told)
    said: dict[str, list[int]] = {}
    for t in other.turns:
        for id, token, _ in t.outputs.rows():
            said.setdefault(id, []).append(token)
    assert said == run.tokens and set(other.finished()) == set(run.finish)


@pytest.mark.parametrize("until", [3, 12, 25])
def test_another_policy_up_to_a_step_has_the_tokens_of_the_whole_log(logged, until):
    path, run = logged
    config, policy, batches = read(path)
    lists = list(batches)
    other = whatif.another(config, policies.get("priority"), lists, whatif.follow(config, policy, lists), until)
    assert len(other.turns) == until and not other.end
    said: dict[str, list[int]] = {}
    for t in other.turns:
        for id, token, _ in t.outputs.rows():
            said.setdefault(id, []).append(token)
    assert all(run.tokens[id][: len(tokens)] == tokens for id, tokens in said.items())
    assert said


def test_another_policy_ends_where_the_log_knows_no_more(tmp_path):
    """The log is cut while r0 runs and r1 has not begun; whoever serves r1 first asks for what nobody wrote down."""
    config, path = SchedConfig(1, 16, 40, 12, 3), tmp_path / "log"
    with EventLog(path, config, Policy()) as log:
        run = Run(config, 1, Policy(), log)
        run.submit(*(Request(f"r{i}", [1, 2, 3], 9, priority=-i, ignore_eos=True) for i in range(2)))
        for _ in range(4):
            run.step()
    config, policy, batches = read(path)
    lists = list(batches)
    other = whatif.another(config, policies.get("priority"), lists, whatif.follow(config, policy, lists))
    assert other.end == "the log does not say how request r1 goes on after 0 tokens" and len(other.turns) == 1
    same = whatif.another(config, policy, lists, whatif.follow(config, policy, lists))
    assert "request r0 goes on after" in same.end and len(same.turns) >= 4
    command = [sys.executable, "-m", "afl_cli", "replay", str(path), "--policy", "priority"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and f"priority ends at call 1: {other.end}" in done.stdout, done.stderr


def test_the_same_policy_makes_the_same_plans(logged):
    path, _ = logged
    config, policy, batches = read(path)
    lists = list(batches)
    told = whatif.follow(config, policy, lists)
    assert whatif.first_difference(told, whatif.another(config, policy, lists, told)) is None


def test_the_trace_holds_every_grant(logged):
    path, run = logged
    config, policy, batches = read(path)
    made = json.loads(json.dumps(perfetto.trace(whatif.follow(config, policy, batches))))["traceEvents"]
    grants = [e for e in made if e["ph"] == "X"]
    assert len(grants) == sum(len(p.rows) for p in run.plans)
    assert sum(e["args"]["tokens"] for e in grants) == sum(p.tokens for p in run.plans)
    for row in {e["tid"] for e in grants}:                                 # a row does one thing at a time
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in grants if e["tid"] == row)
        assert all(b <= c for (_, b), (c, _) in zip(spans, spans[1:], strict=False))
    assert any(e["ph"] == "i" and "computed again" in e["name"] for e in made)


def test_events_survive_the_log():
    for event in (Tick(1.5), Grammar("a"), Grammar("a", False), Input("s", [1, 2], 7)):
        again = decode(json.loads(json.dumps(encode(event))))
        assert encode(again) == encode(event) and type(again) is type(event)


def test_a_cut_last_line_is_a_crash_and_a_bad_one_is_told(logged, tmp_path):
    path, _ = logged
    lines = path.read_text().splitlines()
    (tmp_path / "cut").write_text("\n".join([*lines[:5], lines[5][: len(lines[5]) // 2]]))
    assert replay(tmp_path / "cut").digest() == replay(path, steps=4).digest()
    (tmp_path / "bad").write_text("\n".join([*lines[:5], '[["nonsense", 3]]', *lines[5:]]))
    with pytest.raises(BadInput, match="line 6"):
        replay(tmp_path / "bad")


def test_the_command_shows_tables_and_differences(logged, tmp_path):
    path, run = logged

    def afl(*args):
        command = [sys.executable, "-m", "afl_cli", "replay", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True)

    done = afl(path, "--policy", "priority", "--trace", tmp_path / "t.json")
    assert done.returncode == 0 and f"preemptions {run.state.preemptions}" in done.stdout, done.stderr
    assert "the first difference is in call" in done.stdout and (tmp_path / "t.json").exists()
    figures = json.loads(afl(path, "--json").stdout)["log"]
    assert figures["preemptions"] == run.state.preemptions
    assert json.loads(afl(path, "--json", "--until", 3).stdout)["log"]["calls"] == 3
    for bad in ((tmp_path / "none",), (__file__,), (path, "--policy", "nothing")):
        done = afl(*bad)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


NO_HEADERS = {}, {"config": {}}, {"config": 3, "policy": {}}, {"config": {"rows": 1}, "policy": {}}


@pytest.mark.parametrize("header", NO_HEADERS)
def test_a_header_without_config_or_policy_is_bad_input(tmp_path, header):
    path = tmp_path / "log"
    path.write_text(json.dumps({"afl_sched_log": 2} | header) + "\n")
    with pytest.raises(BadInput, match="header"):
        read(path)
