"""NPU chips, emulated: which vendor operators a step calls, and that every way to run gives the same tokens.

The emulated operators compute a row from that row alone, so equality is exact, as it is on the host's chip.
"""

from typing import Any

import attrs
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from afl import plugins
from afl.chip import Chip, F
from afl.chip import register as register_chip
from afl.chip import registered as registered_chips
from afl.run.generate import stream
from afl.run.load import random_model
from afl.run.sampling import SamplingParams

SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=256, tie_word_embeddings=False,
)
FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PROMPTS = [[5], [7, 3, 9, 11, 2, 1, 4, 8, 6], [60] * 14, [i % 59 for i in range(124)], [i * 7 % 61 for i in range(126)]]
NEW = 7
MODES = {"program": {}, "eager": {"eager": True}, "checked": {"checked": True}}
BATCHES = {
    "alone": {"max_seqs": 1},
    "mixed": {"max_seqs": 5},
    "preempted": {"max_seqs": 5, "kv_blocks": 2, "max_model_len": 140},
}
SAMPLING = {
    "greedy": {},
    "seeded": {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "seed": 11},
    "penalised": {"repetition_penalty": 1.4, "min_tokens": 4, "stop_ids": (3, 17), "bad_words_ids": ((5,), (7, 9))},
}

# what a step may compute without a vendor operator; reasons in afl/ops/kernels/npu_torch.py
PLAIN = {
    "add", "all_reduce", "cast", "div", "edit_logits", "embed", "getitem", "greedy", "last_rows", "mul", "put_tokens",
    "reshape", "rope_angles", "sample", "scale", "split_qkv", "sub", "take_tokens",
}
# what must reach the vendor, and the operators that count as having done so
MUST = {
    "norm": {"npu_rms_norm"},
    "norm behind an addition": {"npu_add_rms_norm"},
    "rotation": {"npu_rotary_mul", "npu_apply_rotary_pos_emb"},
    "product": {"npu_linear"},
    "activation": {"npu_swiglu"},
    "cache write": {"npu_scatter_pa_kv_cache", "_npu_reshape_and_cache"},
    "attention": {"npu_fused_infer_attention_score", "_npu_paged_attention", "_npu_paged_attention_splitfuse",
                  "_npu_paged_attention_splitfuse_v2", "_npu_flash_attention_v3"},
}


def npus() -> list[Chip]:
    plugins.load_ops()
    return [c for c in registered_chips().values() if F.NPU in c.features]


NAMES = [c.name for c in npus()]


@pytest.fixture(scope="module")
def models() -> Any:
    made: dict[Any, Any] = {}

    def get(family: str, chip: str, dtype: str) -> Any:
        key = family, chip, dtype
        if key not in made:
            made[key] = random_model(FAMILIES[family], SIZES, seed=3, chip=chip, dtype=dtype)
        return made[key]

    return get


def run(model: Any, sampling: str, **options: Any) -> list[list[int]]:
    engine = model.engine(**{"max_model_len": 192, "max_step_tokens": 256, "max_seqs": 5} | options)
    got = {}
    for piece in stream(engine, PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True, **SAMPLING[sampling])):
        assert piece.done.error is None, piece.done.error
        got[piece.index] = piece.done.token_ids
    if options.get("kv_blocks"):
        assert engine.sched.preemptions > 0, "the combination must preempt, or it tests nothing"
    return [got[i] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def alone(models: Any) -> Any:
    """Each prompt by itself, one step at a time, nothing traced."""
    made: dict[Any, Any] = {}

    def get(*key: str) -> Any:
        if key not in made:
            made[key] = run(models(*key[:3]), key[3], eager=True, depth=1, max_seqs=1)
        return made[key]

    return get


# ---- what is called -------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Names of the vendor operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("npu", "atb"):
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chip", NAMES)
def test_norm_rotation_product_activation_write_and_attention_reach_the_vendor_in_both_phases(models, chip, family):
    model = models(family, chip, plugins.chip(chip).dtypes[0])
    engine = model.engine(max_seqs=2, max_model_len=64, max_step_tokens=64, depth=1)
    engine.submit([7, 3, 9, 11, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    phases = []
    while engine.busy and len(phases) < 2:
        with Calls() as seen:
            engine.step()
        if seen.names:
            phases.append(seen.names)
    layers, heads = model.c.layers, 2 if family == "qwen3" else 0
    for phase, names in zip(("prefill", "decode"), phases, strict=True):
        count = {what: sum(n in ops for n in names) for what, ops in MUST.items()}
        want = {"norm": 1 + heads * layers, "norm behind an addition": 2 * layers, "product": 4 * layers + 1,
                "activation": layers, "cache write": layers, "attention": layers}
        assert count["rotation"] in (layers, 2 * layers), (phase, count)
        assert {k: v for k, v in count.items() if k != "rotation"} == want, (phase, count)
        assert len(names) == sum(count.values()), set(names) - set().union(*MUST.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chip", NAMES)
def test_what_is_served_by_plain_torch_is_on_the_list(models, chip, family):
    """By the choices of the whole step, sampling included: every kernel not of that list calls the vendor."""
    model = models(family, chip, plugins.chip(chip).dtypes[0])
    engine = model.engine(max_seqs=2, max_model_len=64, max_step_tokens=64)
    for jitted, sizes in ((engine.greedy, {}), (engine.sampled, {"edits": 1})):
        program = jitted.program(tokens=4, rows=2, width=1, **sizes).program
        plain = {k.op.name for k in program.plan.kernels if k.name == "npu_torch"}
        assert plain <= PLAIN
        assert not any(k.name == "reference" for k in program.plan.kernels)


def test_no_npu_chip_runs_references():
    assert [c.name for c in npus() if c.allows_reference] == []


def test_every_plain_kernel_says_why():
    from afl.ir.op import registered
    from afl.ops.kernels import npu_torch

    kernels = [k for o in registered().values() for k in o.kernels if k.name == "npu_torch"]
    assert {k.op.name for k in kernels} == PLAIN
    own = [k for k in kernels if k.fn.__module__ == npu_torch.__name__]
    assert own and all(k.fn.__doc__ for k in own)


# ---- every way to run -----------------------------------------------------------------------------------------------

WAYS = [
    # mode, depth, tokens of a step, batch, sampling
    ("program", 1, 256, "alone", "seeded"),
    ("program", 2, 5, "mixed", "greedy"),
    ("program", 2, 256, "preempted", "penalised"),
    ("eager", 2, 5, "mixed", "penalised"),
    ("eager", 1, 256, "preempted", "greedy"),
    ("checked", 1, 256, "preempted", "seeded"),
    ("checked", 2, 256, "mixed", "seeded"),
]


# a chip of two dtypes takes them in turn
TABLE = [(c.name, c.dtypes[i % len(c.dtypes)], *way) for c in npus() for i, way in enumerate(WAYS)]


@pytest.mark.parametrize("chip,dtype,mode,depth,chunk,batch,sampling", TABLE)
def test_all_paths_give_the_same_tokens(models, alone, chip, dtype, mode, depth, chunk, batch, sampling):
    family = "qwen3" if (depth + len(dtype)) % 2 else "llama"
    options = {"depth": depth, "max_step_tokens": chunk} | MODES[mode] | BATCHES[batch]
    assert run(models(family, chip, dtype), sampling, **options) == alone(family, chip, dtype, sampling)


def test_chips_with_the_same_kernels_give_the_same_tokens(alone):
    first, *others = (c.name for c in npus() if F.FIA in c.features)
    for dtype in ("bfloat16", "float16"):
        for other in others:
            assert alone("llama", other, dtype, "greedy") == alone("llama", first, dtype, "greedy")


def test_decode_by_lengths_in_a_host_tensor_gives_the_same_tokens(models, alone):
    made = register_chip(attrs.evolve(plugins.chip("a3"), name="a3_atb", prefer={"paged_attention": ("atb", "fia")}))
    try:
        model = attrs.evolve(models("llama", "a3", "bfloat16"), chip=made)
        with Calls() as seen:
            got = run(model, "greedy", max_step_tokens=64)
        assert got == alone("llama", "a3", "bfloat16", "greedy")
        assert {"_npu_paged_attention", "npu_fused_infer_attention_score"} <= set(seen.names)
    finally:
        from afl import chip as chips

        chips._CHIPS.pop("a3_atb")
