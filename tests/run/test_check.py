"""`afl check`: bytes by closed formulas, the scaled trace against the full one, peaks against a count by hand."""

import re
from typing import Any

import attrs
import pytest
from shapes import LLAMA_70B, LLAMA_405B, TINY, llama

import afl
from afl import config as configs
from afl import plugins
from afl.config import EngineConfig
from afl.models.llama import config as llama_config
from afl.run import preflight
from afl.run.load import abstract_model, asked, definition_of
from afl.run.memory import Pool
from afl.run.preflight import Source, check, one_rank
from afl.run.programs import greedy_program
from afl.run.roofline import Lengths, step_time
from afl.run.shards import local
from afl.run.survey import graph_limit, survey
from afl.types import TensorType

NPUS = ("310p", "a2", "a3", "a5")
HALF = {"310p": "float16"}
SMALL = dict(max_seqs=2, max_step_tokens=4)


def source(settings: dict[str, Any]) -> Source:
    return Source(settings, "bfloat16", "here")


def weight_bytes(s: dict[str, Any], tp: int, tile: int = 1) -> int:
    """Of one rank, two bytes a number.  tile: rows in multiples of which the head is stored; nothing else is padded."""
    d, h, k, f, v = (s[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
                                    "vocab_size"))
    e = s.get("head_dim", d // h)
    layer = 2 * d + (h // tp + 2 * max(1, k // tp)) * e * d + d * h // tp * e + 3 * d * f // tp
    return 2 * (s["num_hidden_layers"] * layer + d + (v // tp + -(-v // tp // tile) * tile) * d)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "tp"), [(LLAMA_70B, 8), (LLAMA_405B, 16), (LLAMA_405B, 32)])
@pytest.mark.parametrize("chip", NPUS)
def test_bytes_of_weights_and_cache_equal_the_closed_formulas(settings, tp, chip):
    model = one_rank(*asked(settings, EngineConfig.of({"chip": chip}), plugins.chip(chip), tp=tp))
    assert model.param_bytes == weight_bytes(settings, tp, 16 if chip == "310p" else 1)
    heads = max(1, 8 // tp)
    assert sum(s.block_bytes(128, model.dtype) for s in model.caches) == (
        settings["num_hidden_layers"] * 128 * 2 * heads * 128 * 2)


def test_a_report_adds_up_to_the_device():
    r = check(source(LLAMA_70B), "a3", tp=8, max_model_len=32768, **SMALL)
    m, f = r.memory, r.fit
    assert r.supported and not r.runs_today and r.parameters == 70_553_706_496
    assert m.weight_bytes == weight_bytes(LLAMA_70B, 8) and m.usable_bytes == int((64 << 30) * 0.9)
    assert f.block_bytes == 80 * 128 * 2 * 1 * 128 * 2 and m.cache_bytes == (f.blocks + 1) * f.block_bytes
    rest = m.usable_bytes - m.weight_bytes - m.activation_bytes - m.communication_bytes
    assert m.cache_bytes <= rest < m.cache_bytes + f.block_bytes, "as many blocks as fit, and not one more"
    assert f.tokens == 128 * f.blocks and f.full_requests == f.blocks // (32768 // 128)


def test_axes_of_the_parameters_say_what_is_cut():
    """The other description of shards, by the names of axes in the specs, gives the same shapes."""
    it = definition_of(LLAMA_70B)
    c = it.config(LLAMA_70B)
    for tp in (2, 8):
        mesh = {"heads": tp, "ffn": tp, "vocab": tp}
        whole, part = (dict(afl.tree.paths(it.params(x))) for x in (c, local(c, tp)))
        for name, spec in whole.items():
            cut = tuple(n // mesh.get(axis, 1) for n, axis in zip(spec.shape, spec.axes, strict=True))
            assert part[name].shape == cut, name


# ---- I06: what is not used is not planned ---------------------------------------------------------------------------


def test_i06_bytes_of_what_is_absent_are_not_planned():
    options = dict(chip="a3", max_model_len=128, **SMALL)
    tied, untied = (check(source(TINY | {"tie_word_embeddings": t}), **options) for t in (True, False))
    assert untied.memory.weight_bytes - tied.memory.weight_bytes == 192 * 64 * 2
    alone, two = (check(source(LLAMA_70B), "a5", tp=tp, **SMALL) for tp in (2, 4))
    assert alone.memory.communication_bytes == two.memory.communication_bytes == 2 * (200 << 20)
    one = check(source(TINY), **options)
    assert one.memory.communication_bytes == 0, "one rank talks to nobody"
    more = check(source(TINY), tp=2, **options)
    budget = one.memory.usable_bytes - one.memory.weight_bytes - one.memory.activation_bytes
    assert one.fit.blocks == budget // one.fit.block_bytes - 1
    assert more.memory.communication_bytes and not any("draft" in f.name for f in attrs.fields(type(one.memory)))
    bias = check(source(TINY | {"attention_bias": True}), **options)
    assert bias.fit.blocks <= one.fit.blocks and bias.memory.weight_bytes > one.memory.weight_bytes


# ---- C05, C06 -------------------------------------------------------------------------------------------------------


def test_c05_the_cache_is_sized_by_the_heads_own_channels():
    s = llama(2, 1792, 24, 8, 2048, head_dim=128)
    r = check(source(s), "a3", **SMALL)
    assert r.supported and r.fit.block_bytes == 2 * 128 * 2 * 8 * 128 * 2
    assert r.memory.weight_bytes == weight_bytes(s, 1)


def test_c06_fewer_kv_heads_than_ranks_are_held_by_several_and_odd_sizes_are_refused_by_name():
    s = llama(2, 64, 4, 2, 96, 192, head_dim=16)
    four = check(source(s), "a3", tp=4, **SMALL)
    assert four.supported and any("2 kv heads over 4 ranks" in n for n in four.notes)
    assert four.fit.block_bytes == check(source(s), "a3", tp=2, **SMALL).fit.block_bytes == 2 * 128 * 2 * 1 * 16 * 2
    three = check(source(s), "a3", tp=3, **SMALL)
    assert not three.supported and any("tp 3 does not divide 4 query heads; nearest: 2 or 4" in str(v)
                                       for v in three.violations)


# ---- the trace ------------------------------------------------------------------------------------------------------


def pool(model: Any, blocks: int = 32) -> Pool:
    size = 16 if model.chip.limits.block_tokens[0] == 16 else 128
    return Pool(blocks, size, sum(s.block_bytes(size, model.dtype) for s in model.caches), 512, "")


def tiny(chip: str, **options: Any) -> Any:
    config = EngineConfig.of({"chip": chip, **SMALL, **options})
    return abstract_model(*asked(TINY, config, plugins.chip(chip)))


LENGTHS = Lengths(((1, 99), (1, 7), (5, 3)))


@pytest.mark.parametrize(("chip", "tp", "options"), [
    ("a3", 1, {}), ("a2", 2, {"max_step_tokens": 4}), ("310p", 1, {"max_seqs": 2}), ("cpu", 1, {}),
    ("cpu", 1, {"weights": "int8"}),
])
def test_two_and_three_layers_tell_what_all_of_them_do(chip, tp, options):
    model = tiny(chip, **options)
    if tp > 1:
        model = model.resized(local(model.c, tp))
    part, whole = (survey(model, pool(model), tp, full=full) for full in (False, True))
    assert len(part.decode.programs) == 2 and len(whole.decode.programs) == 1
    assert part.programs == whole.programs and part.kernels == whole.kernels and part.capture == whole.capture
    assert part.programs[0].equations > 32 * 8
    for a, b in ((part.decode, whole.decode), (part.prefill, whole.prefill)):
        assert close(a.work(LENGTHS), b.work(LENGTHS))


def close(a: Any, b: Any) -> bool:
    same = dict(a.flops) == dict(b.flops) and a.bytes == b.bytes and a.link_bytes == b.link_bytes
    same &= (a.host_vectors, a.host_elements) == (b.host_vectors, b.host_elements)
    return same and a.host_us == pytest.approx(b.host_us)


@pytest.mark.parametrize("chip", ["a3", "310p", "cpu"])
def test_the_peak_is_that_of_a_count_by_hand(chip):
    """From the text of the generated program: a line makes its results, `del` takes them away."""
    model = tiny(chip)
    largest = survey(model, pool(model)).programs[0]
    program = greedy_program(model, pool(model)).program(**largest.sizes).program
    stores: list[int] = []              # bytes of each storage
    home: dict[Any, int] = {}           # value -> its storage; a view keeps the whole one alive
    names: dict[str, Any] = {}
    alive: set[int] = set()
    most = 0
    eqns = iter(zip(program.graph.eqns, program.plan.kernels, strict=True))
    for line in program.source.splitlines()[1:-1]:
        if line.strip().startswith("del "):
            for name in line.strip()[4:].split(","):
                names.pop(name.strip(), None)
            alive = {home[v] for v in names.values() if home[v] >= 0}
            continue
        e, k = next(eqns)
        at = {o.name: v for o, v in zip(e.op.operands, e.ins, strict=True)}
        results = [n.strip() for n in line.split(" = ")[0].split(",") if n.strip()]
        for i, (name, v) in enumerate(zip(results, e.outs, strict=True)):
            base = k.inplace.get(i, e.op.view_of)
            if base is None:
                stores.append(v.type.nbytes if isinstance(v.type, TensorType) else 0)
            names[name], home[v] = v, len(stores) - 1 if base is None else home.get(at[base], -1)
            alive.add(home[v])
        most = max(most, sum(stores[i] for i in alive if i >= 0))
    assert abs(largest.peak_bytes - most) <= 0.1 * most, (largest.peak_bytes, most)


def test_every_declared_bucket_is_traced():
    """D04: 90 requests, whose number is no step of the ladder, have a bucket that holds them all."""
    model = tiny("a3", max_seqs=90, max_step_tokens=96)
    ladder = greedy_program(model, pool(model, 128)).options.ladder
    assert max(ladder.steps["rows"]) == 90 and all(ladder.fit({"tokens": n, "rows": n, "width": 1})["rows"] == 90
                                                   for n in range(81, 91))
    found = survey(model, pool(model, 128))
    assert found.programs[0].buckets == len(ladder.buckets()) > 1
    assert 0 < found.capture.graphs < sum(p.buckets for p in found.programs), "those of decode steps"
    assert ladder.fit({"tokens": 97, "rows": 1, "width": 1}) is None, "beyond it, a program of its own"


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 90, 256])
def test_d04_no_list_of_buckets_is_empty(max_seqs):
    model = tiny("a3", max_seqs=max_seqs, max_step_tokens=max_seqs)
    steps = greedy_program(model, pool(model)).options.ladder.steps
    assert all(s and list(s) == sorted(set(s)) for s in steps.values()) and steps["rows"][-1] == max_seqs


def test_the_stream_limit_is_the_published_formula():
    it = plugins.chip("a3")
    assert graph_limit(it) == 1800 and graph_limit(it, tp=4) == (1800 - 40) // 3
    assert graph_limit(it, tp=4, dp=2) == (1800 - 80) // 5 and graph_limit(plugins.chip("cpu")) == 0


def test_what_cannot_be_captured_is_named():
    r = check(source(TINY), "310p", **SMALL)
    assert "linear/npu_linear_nz is not capturable" in r.capture.problems and r.capture.captures
    assert not check(source(TINY), "a3", eager=True, **SMALL).capture.captures
    assert not check(source(TINY), "cpu", **SMALL).capture.captures


def test_kernels_come_with_what_was_rejected_and_host_lengths_with_their_cost():
    r = check(source(TINY), "a3", max_model_len=128, max_seqs=8, max_step_tokens=16)
    (attention,) = [k for k in r.kernels if k.op == "paged_attention"]
    assert attention.chosen == "fia" and attention.uses == 32 and "atb_nz" in attention.rejected
    assert r.host.vectors == 2 * 32 and r.host.elements == 32 * (8 + 9)
    assert (r.host.least_us, r.host.most_us) == pytest.approx((32 * 17 * 0.16, 32 * 17 * 0.28))
    assert check(source(TINY), "cpu", **SMALL).host.vectors == 0


# ---- time -----------------------------------------------------------------------------------------------------------


def test_work_of_a_step_by_closed_formulas():
    s, tp = LLAMA_70B, 8
    r = check(source(s), "a3", tp=tp, max_model_len=4096, max_seqs=16, max_step_tokens=512)
    decode, prefill = r.steps
    d, f, v, layers, h, e = 8192, 28672, 128256, 80, 64, 128
    products = (h + 2 * 8) * e * d + h * e * d + 3 * d * f
    rows, context = 16, decode.context
    attention = 4 * h * e // tp * context * rows * layers
    assert decode.flops == 2 * rows * (layers * products + v * d) // tp + attention
    pairs = 512 * 513 // 2
    assert prefill.flops == 2 * 512 * layers * products // tp + 2 * v * d // tp + 4 * h * e // tp * pairs * layers
    assert decode.link_bytes == 2 * layers * rows * d * 2 * 2 * (tp - 1) / tp
    cache = layers * rows * context * 2 * 1 * e * 2
    weights = weight_bytes(s, tp) - 2 * v // tp * d
    assert weights + cache < decode.bytes < (weights + cache) * 1.03, "activations of 16 tokens weigh little"


def test_the_limit_is_the_longest_part_and_a_bound():
    r = check(source(LLAMA_70B), "a3", tp=8, max_model_len=4096, max_seqs=16, max_step_tokens=8192)
    for s in r.steps:
        parts = {"compute": s.compute_s, "memory bandwidth": s.memory_s, "link": s.link_s, "host lengths": s.host_s}
        assert s.seconds == max(parts.values()) == parts[s.limit]
    decode, prefill = r.steps
    assert decode.memory_s == decode.bytes / 1.6e12 and prefill.compute_s == prefill.flops / 376e12
    assert decode.link_s == decode.link_bytes / 196e9 and decode.limit == "memory bandwidth"
    unknown = step_time("decode", survey(tiny("cpu"), pool(tiny("cpu"))).decode.work(LENGTHS), LENGTHS,
                        plugins.chip("cpu").roofline)
    assert unknown.seconds is None and unknown.limit.startswith("unknown")


def test_lengths_count_pairs_and_keys():
    rows = [(3, 2), (1, 7)]
    assert Lengths(tuple(rows)).pairs == sum(before + i + 1 for n, before in rows for i in range(n))
    assert Lengths(tuple(rows)).keys == 5 + 8


# ---- the host's chip ------------------------------------------------------------------------------------------------


def test_on_the_host_the_report_gives_the_pool_that_a_run_gets(monkeypatch):
    monkeypatch.setattr(configs, "available_memory", lambda *_: 40 << 20)
    small = TINY | {"num_hidden_layers": 2}
    engine = afl.random_model("LlamaForCausalLM", small).engine(max_seqs=512, max_step_tokens=512)
    r = check(source(small), "cpu", max_seqs=512, max_step_tokens=512)
    assert r.fit.blocks == engine.pool.blocks and r.fit.max_model_len == engine.pool.max_model_len
    assert r.memory.usable_bytes == 10 << 20


def test_b22_one_limit_in_report_and_engine(monkeypatch):
    """Memory for 150 tokens, a config that says 262,144."""
    long = TINY | {"num_hidden_layers": 2, "max_position_embeddings": 262_144}
    block = 2 * 10 * 2 * 4 * 16 * 4
    monkeypatch.setattr(configs, "available_memory", lambda *_: 16 * block * 4)
    engine = afl.random_model("LlamaForCausalLM", long).engine(block_tokens=10)
    r = check(source(long), "cpu", block_tokens=10, **SMALL)
    assert r.fit.max_model_len == engine.pool.max_model_len == engine.sched.config.max_model_len == 150
    assert any("150 tokens" in n and "262144" in n for n in r.notes) and r.fit.full_requests == 0


def test_the_config_that_is_asked_about_is_left_alone():
    before = repr(LLAMA_70B)
    check(source(LLAMA_70B), "a3", tp=8, **SMALL)
    assert repr(LLAMA_70B) == before and llama_config(LLAMA_70B).layers == 80


def test_reports_are_read_on_one_screen_and_compared():
    from afl.run.report import compare

    reports = [check(source(LLAMA_70B), name, tp=8, **SMALL) for name in NPUS]
    for r in reports:
        lines = str(r).splitlines()
        assert len(lines) <= 45 and re.search(r"weights +16\.\d GiB", str(r))
    table = compare(reports).splitlines()
    assert table[0].split() == list(NPUS) and len({line.split()[0] for line in table}) > 10
    assert preflight.FRACTION == 0.9
