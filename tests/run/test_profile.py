"""A profiled run: the same tokens, every equation accounted for, a trace that nests."""

import json

import numpy as np
import pytest
import tiny
import torch

import afl
from afl.errors import ConfigError
from afl.ir.profile import label, timed
from afl.run.profile import PHASES, ProfiledEngine
from afl.run.sampling import SamplingParams


@pytest.fixture(scope="module")
def model():
    return afl.random_model("LlamaForCausalLM", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 128, "tie_word_embeddings": False,
    }, max_seqs=3, max_step_tokens=16)


def serve(engine):
    """Tokens of two greedy requests and one that draws."""
    out = {}
    for n, t in ((5, 0.0), (21, 0.0), (3, 0.9)):
        engine.submit(list(range(1, n)), SamplingParams(max_tokens=6, temperature=t, seed=1, ignore_eos=True))
    while engine.busy:
        step = engine.step().outputs
        for id, token in zip(step.ids, step.tokens.tolist(), strict=True):
            out.setdefault(id, []).append(token)
    return out


@pytest.fixture(scope="module")
def engine(model):
    made = ProfiledEngine(model)
    made.told = serve(made)
    return made


def test_profiling_changes_no_token(model, engine):
    assert engine.told == serve(model.engine())


def test_every_call_of_every_equation_is_in_the_table(engine):
    profile = engine.profile
    assert {p.name for p, _ in profile.calls} == {"greedy_step", "sample_step"} and len(profile.calls) == engine.steps
    assert sum(r.calls for r in profile.rows()) == sum(len(p.graph.eqns) for p, _ in profile.calls)
    assert sum(r.ns for r in profile.rows()) == profile.phases()["program"]
    down = next(r for r in profile.rows() if r.label == "linear layers.*.down.w")
    assert down.calls == 3 * engine.steps
    assert [r.ns for r in profile.rows()] == sorted((r.ns for r in profile.rows()), reverse=True)


def test_times_belong_to_the_equations_they_are_noted_for(model, monkeypatch):
    """A clock that each kernel moves by its own amount."""
    from afl.run import profile as module

    engine = ProfiledEngine(model)
    now = [1]
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: now[0])
    made = engine.greedy.program(tokens=2, rows=1, width=1)
    g = made.program.graph
    for i, v in enumerate(made.program.kernels):
        def slow(*a, _fn=made.fn.__globals__[v], _by=10 ** (i + 1), **k):
            now[0] += _by
            return _fn(*a, **k)

        made.fn.__globals__[v] = slow
    engine.submit([1, 2], SamplingParams(max_tokens=1))
    while engine.busy:
        engine.step()
    want = {v: 10 ** (i + 1) for i, v in enumerate(made.program.kernels)}
    for r in engine.profile.rows():
        per_call = {want[f"k_{e.op.name}_{r.kernel}"] for e in g.eqns if label(e, g) == r.label}
        assert {r.ns // r.calls} == per_call and r.ns % r.calls == 0


def test_the_trace_nests_and_names_its_tracks(engine, tmp_path):
    engine.profile.write(tmp_path / "p.json")
    read = json.loads((tmp_path / "p.json").read_text())
    spans = [e for e in read["traceEvents"] if e["ph"] == "X"]
    phases, equations = ([e for e in spans if e["cat"] == c] for c in ("phase", "equation"))
    assert {e["name"] for e in phases} == set(PHASES) and all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    programs = [(e["ts"], e["ts"] + e["dur"]) for e in phases if e["name"] == "program"]
    inside = [any(a - 1e-3 <= e["ts"] and e["ts"] + e["dur"] <= b + 1e-3 for a, b in programs) for e in equations]
    assert equations and all(inside)
    ends = np.cumsum([0])
    for e in sorted(phases, key=lambda e: e["ts"]):
        assert e["ts"] >= ends[-1] - 1e-3, "phases lie one behind the other"
        ends = np.append(ends, e["ts"] + e["dur"])
    assert all({"number", "kernel", "source", "equation", "program"} <= set(e["args"]) for e in equations)


def test_a_long_run_leaves_equations_out_of_the_trace_and_says_so(engine, monkeypatch):
    from afl.run import profile as module

    total = sum(len(p.graph.eqns) for p, _ in engine.profile.calls)
    monkeypatch.setattr(module, "MOST_EVENTS", total - 7)
    trace = engine.profile.trace()
    assert trace["otherData"] == {"equations left out": 7}
    assert sum(e.get("cat") == "equation" for e in trace["traceEvents"]) == total - 7


def test_eager_has_no_programs_to_profile(model):
    with pytest.raises(ConfigError, match="eager traces none"):
        ProfiledEngine(model, afl.EngineConfig(eager=True))


def test_errors_of_a_timed_program_name_the_equation(model):
    engine = model.engine()
    bound = timed(engine.greedy.program(tokens=2, rows=1, width=1), lambda: None)
    with pytest.raises(Exception) as caught:
        bound(*[torch.zeros(1)] * len(bound.program.inputs))
    assert any("equation" in n for n in caught.value.__notes__)


def test_the_command_writes_the_file_and_shows_the_table(tmp_path):
    from afl_cli.commands import app
    from typer.testing import CliRunner

    folder = tiny.folder(tmp_path / "m")
    run = lambda *a: CliRunner().invoke(app, ["run", "--model", str(folder), "the cat", *a])  # noqa: E731
    done = run("--max-tokens", "3", "--profile", str(tmp_path / "p.json"))
    assert done.exit_code == 0 and "schedule" in done.stderr and "linear layers.*.qkv.w" in done.stderr
    assert {e["name"] for e in json.loads((tmp_path / "p.json").read_text())["traceEvents"] if e["ph"] == "X"} >= {
        "schedule", "pack", "program", "detokenise", "linear layers.*.qkv.w"}
    for bad in (("--profile", str(tmp_path)), ("--profile", str(tmp_path / "no" / "p.json")),
                ("--profile", str(tmp_path / "q.json"), "--eager")):
        done = run(*bad)
        assert done.exit_code == 2 and "--profile" in done.stderr
    assert not (tmp_path / "q.json").exists()
