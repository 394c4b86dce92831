"""Bug log, part D and C15: programs, buckets, host buffers, index checks, positions."""

import json

import attrs
import numpy as np
import pytest
import torch
from rng import Rng

import afl
from afl import plugins
from afl.errors import CheckFailed, RetraceError
from afl.ir import op as ops
from afl.ir.kernel import reference
from afl.ir.op import size_of
from afl.models.rope_config import rope_of
from afl.ops.rope import rope, rope_angles
from afl.run.pack import batch_of
from afl.run.sampling import SamplingParams
from afl.types import type_of

# ---- positions ------------------------------------------------------------------------------------------------------

POSITIONS = np.array([32_767, 32_768, 131_071], np.int32)


@pytest.mark.parametrize("base", [1e4, 1e6])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "program"])
def test_c15_cosine_and_sine_hold_at_far_positions(base, compiled):
    inv = rope_of({"rope_theta": base}, 128).inv_freq
    at = torch.from_numpy(POSITIONS)
    given = {"inv_freq": inv, "scale": 1.0}
    if compiled:
        cos, sin = afl.jit(lambda p: rope_angles(p, **given), chip=plugins.chip("cpu"))(at)
    else:
        cos, sin = rope_angles(at, **given)
    angle = POSITIONS.astype(np.float64)[:, None] * base ** (-np.arange(64) / 64.0)
    assert np.abs(cos.double().numpy() - np.cos(angle)).max() <= 5e-3
    assert np.abs(sin.double().numpy() - np.sin(angle)).max() <= 5e-3


def test_c15_bfloat16_activations_are_turned_by_float32_angles(settings):
    model = afl.random_model("LlamaForCausalLM", settings, dtype="bfloat16")
    angles = [e for e in model.graph().eqns if e.op.name == "rope_angles"]
    assert angles and all(v.type.dtype == torch.float32 for e in angles for v in e.outs)
    assert all(e.ins[0].type.dtype == torch.int32 for e in angles)
    x = torch.randn(3, 1, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    inv = rope_of({"rope_theta": 1e4}, 128).inv_freq
    got = rope(x, *rope_angles(torch.from_numpy(POSITIONS), inv_freq=inv))[:, 0].double()
    angle = torch.from_numpy(POSITIONS.astype(np.float64)[:, None] * 1e4 ** (-np.arange(64) / 64.0))
    a, b = x[:, 0, :64].double(), x[:, 0, 64:].double()
    want = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    assert (got - want).abs().max() < 0.05  # rounding of bfloat16; a wrong angle is off by whole units


# ---- buckets and traces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_d05_more_requests_and_longer_prompts_than_the_largest_bucket(model, capturing, serve, strict):
    requests = {str(i): ([i, 3, i + 1], {"max_tokens": 14}) for i in range(17)} | {
        "long": ([4] * 90, {"max_tokens": 20})
    }
    want = serve(model.engine(), requests)
    chip = attrs.evolve(model, chip=capturing)
    engine, plans = chip.engine(max_seqs=16, max_step_tokens=16, strict=strict, max_model_len=112), []
    assert serve(engine, requests, plans) == want
    assert max(len(p.rows) for p in plans) == 16 and max(p.tokens for p in plans) == 16


def test_d05_through_the_command_line(llama, capturing, cli, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"the cat {i}\n" for i in range(17)))
    given = ("run", "--model", llama, "--file", file, "--no-chat", "--json", "--max-tokens", 4, "--ignore-eos")

    def tokens(*more):
        result = cli(*given, *more)
        assert result.exit_code == 0, result.stderr
        return [json.loads(line)["token_ids"] for line in result.stdout.splitlines()]

    assert tokens("--chip", "cpu_captures", "--max-seqs", 16, "--max-step-tokens", 16) == tokens()


def test_d06_one_trace_holds_for_every_length(model):
    """Traced at ten tokens, run at 11 to 40: equal to eager at each, in tokens and in log-probabilities."""
    prompt, how = [[5, 1, 9, 2, 7, 3, 8, 4, 6, 11]], {"max_tokens": 31, "logprobs": -1}
    (want,) = model.generate(prompt, options={"eager": True}, **how)
    (got,) = model.generate(prompt, **how)
    assert got.token_ids == want.token_ids and len(got.token_ids) == 31
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        assert dict(a.top) == pytest.approx(dict(b.top), abs=1e-4)
    engine = model.engine()
    engine.submit(prompt[0], SamplingParams(max_tokens=31))
    while engine.busy:
        engine.step()
    assert engine.traces == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_d07_the_caller_may_reuse_its_buffers_at_once(model, depth):
    want = model.generate([[5, 1, 9, 2]], max_tokens=9, logit_bias={7: 2.0}, repetition_penalty=1.2)[0].token_ids
    for dtype in (np.int32, np.int64):
        engine, mine, bias = model.engine(depth=depth), np.array([5, 1, 9, 2], dtype), {7: 2.0}
        engine.submit(mine, SamplingParams(max_tokens=9, logit_bias=bias, repetition_penalty=1.2))
        mine[:] = 0
        bias.clear()
        got = []
        while engine.busy:
            got += [t for t in engine.step().outputs.tokens.tolist() if t >= 0]
        assert tuple(got) == want


KINDS = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"min_tokens": 2, "stop_ids": (3,), "presence_penalty": 0.4},
    {"bad_words_ids": ((5, 6),)},
]


def random_requests(n, most, seed=0):
    rng = np.random.default_rng(seed)
    return {
        str(i): (
            rng.integers(0, 61, rng.integers(1, most)).tolist(),
            {"max_tokens": int(rng.integers(2, 5)), **KINDS[i % 6]},
        )
        for i in range(n)
    }


def test_d09_five_hundred_requests_of_random_lengths_trace_two_programs(model, serve):
    engine = model.engine(strict=True, max_seqs=64, max_step_tokens=256, max_model_len=128)
    done = serve(engine, random_requests(500, 100))
    assert all(why in ("length", "stop") for _, why in done.values())
    assert engine.traces <= 2, "one range for greedy steps, one for the others"
    with pytest.raises(RetraceError, match="not declared"):
        engine.greedy.program(tokens=257, rows=1, width=1)
    with pytest.raises(RetraceError, match="not declared"):
        engine.sampled.program(tokens=1, rows=65, width=1, edits=0)
    assert engine.traces <= 2


def test_d09_buckets_bound_the_traces(model, capturing, serve):
    engine = attrs.evolve(model, chip=capturing).engine(strict=True, max_seqs=4, max_step_tokens=16, max_model_len=48)
    requests = random_requests(60, 40)
    got = serve(engine, requests)
    ladders = [j.options.ladder for j in (engine.greedy, engine.sampled)]
    declared = sum(int(np.prod([len(s) for s in ladder.steps.values()])) for ladder in ladders)
    assert 2 < engine.traces <= declared
    assert got == serve(model.engine(max_model_len=48), requests)
    traces = engine.traces
    assert serve(engine, requests) == got and engine.traces == traces


def test_d12_eager_traces_and_captures_nothing(model, capturing, serve):
    requests = {"a": ([1, 2], {"max_tokens": 6}), "b": ([3], {"max_tokens": 3, "temperature": 1.0, "seed": 1})}
    want = serve(engine := model.engine(), requests)
    assert engine.greedy.traces and engine.sampled.traces, "steps of both kinds, or half of the switch is not tried"
    for it in (model, attrs.evolve(model, chip=capturing)):
        engine = it.engine(eager=True)
        assert serve(engine, requests) == want
        assert engine.traces == 0 and not engine.greedy.programs() and not engine.sampled.programs()


# ---- indices --------------------------------------------------------------------------------------------------------


def step_with(model, eager, *, token=5, slot=17, block=1, kv_len=2, row=0, blocks=4):
    """One decode step through a checked jit; the pool has `blocks` usable blocks of 16 tokens."""
    state = model.init_state(blocks=blocks, block_tokens=16, rows=1)
    f = afl.jit(model.step, chip=model.chip, checked=True, eager=eager)
    batch = batch_of(
        *(np.array([x]) for x in (token, 1, slot)),
        np.array([0, 1]),
        np.array([kv_len]),
        np.array([[block]]),
        np.array([row]),
    )
    return f(model.params, state, batch)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "program"])
def test_d11_an_index_beyond_the_storage_is_an_error_and_never_a_clamp(model, eager):
    step_with(model, eager)
    step_with(model, eager, block=4, slot=4 * 16 + 15)  # the last usable block; planner and storage agree
    for wrong in (
        {"block": 5},
        {"block": -1},
        {"slot": 5 * 16},
        {"slot": -2},
        {"token": 61},
        {"token": -1},
        {"kv_len": 17},
    ):
        with pytest.raises(CheckFailed, match="holds index"):
            step_with(model, eager, **wrong)


def test_d11_the_pool_and_the_state_hold_the_same_number_of_blocks(model):
    engine = model.engine(kv_blocks=9, block_tokens=4)
    assert engine.sched.pool.free == engine.pool.blocks == 9
    assert {len(c) for cache in engine.state.caches for c in afl.tree.leaves(cache)} == {10}


plugins.load_ops()
INDEXED = [(o, i) for o in ops.registered().values() for i, x in enumerate(o.operands) if x.index is not None]


def test_there_are_operands_with_index_facts():
    assert {o.name for o, _ in INDEXED} >= {"embed", "write_kv", "paged_attention", "edit_logits", "put_tokens"}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "program"])
@pytest.mark.parametrize("op, at", INDEXED, ids=[f"{o.name}-{o.operands[i].name}" for o, i in INDEXED])
def test_checked_mode_holds_every_index_to_its_schema(op, at, compiled):
    """Beyond the range is refused, -1 too unless the schema gives it a meaning; the cases themselves pass."""
    fact, chip = op.operands[at].index, plugins.chip("cpu")
    tried = 0
    for case in op.examples(Rng(1)):
        args, values = op.bind(case[:-1], case[-1])
        if not args[at].numel():
            continue
        tried += 1
        dims = op.dims(tuple(None if x is None else type_of(x) for x in args))
        lowest = -1 if fact.none else -size_of(fact.low, dims) if fact.low else 0
        high = size_of(fact.limit, dims)

        def run(value=None, args=args, values=values):
            given = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            if value is not None:
                given[at].view(-1)[-1] = value
            f = afl.jit(lambda given: op(*given, **dict(values)), chip=chip, checked=True, eager=not compiled)
            return f(tuple(given))

        run()
        for bad in (lowest - 1, -(1 << 31), *((high, 1 << 30) if high < 1 << 30 else ())):
            with pytest.raises(CheckFailed, match="holds index"):
                run(bad)
        if fact.none:
            run(-1)
        elif not fact.low:
            with pytest.raises(CheckFailed, match="index -1"):
                run(-1)
    assert tried


TARGETS = ("k_cache", "v_cache", "last", "logits")      # what an op with -1 indices writes into


def test_minus_one_does_nothing_where_it_is_allowed(model):
    """Neither the first row nor the last one is touched."""
    for op, at in INDEXED:
        if not op.operands[at].index.none:
            continue
        for case in op.examples(Rng(2)):
            args, values = op.bind(case[:-1], case[-1])
            none = torch.full_like(args[at], -1)
            given = [none if i == at else x.clone() if isinstance(x, torch.Tensor) else x for i, x in enumerate(args)]
            for k in [reference(op), *(k for k in op.kernels if k.needs <= model.chip.features and not k.fmt)]:
                out = k.fn(*(x.clone() if isinstance(x, torch.Tensor) else x for x in given), **dict(values))
                outs = out if isinstance(out, tuple) else (out,)
                targets = [x for o, x in zip(op.operands, given, strict=True) if o.name in TARGETS]
                same = [any(torch.equal(y, x) for y in outs) for x in targets]
                assert targets and all(same), f"{op.name}/{k.name}"
