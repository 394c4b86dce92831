"""NPU kernels at the limits of the vendor's operators, and what they pass that no result shows."""

from typing import Any

import attrs
import pytest
import torch
from rng import Rng
from torch import Tensor

from afl import plugins
from afl.chip import registered
from afl.errors import AflError
from afl.ir import op as ops
from afl.ir.kernel import Kernel, rejection
from afl.layout import layout
from afl.ops.act import swiglu
from afl.ops.attention import paged_attention
from afl.ops.kernels import atb_nz, atb_paged, fia, npu_act
from afl.ops.kernels.npu_norm import one_dtype
from afl.ops.rope import rope
from afl.types import HostInts, HostIntsType, TensorType

plugins.load_ops()
HALF = torch.float16
NPU_FEATURES = set().union(*(c.features for c in registered().values() if c.soc))
F32, I32 = torch.float32, torch.int32


def kernel_of(op: str, name: str) -> Kernel:
    return next(k for k in ops.registered()[op].kernels if k.name == name)


def attention_types(h: int, k: int, e: int, s: int, fmt: str = "nd") -> tuple[Any, ...]:
    cache = TensorType((4, s, k, e), HALF, fmt)
    return (TensorType((3, h, e), HALF), cache, cache, TensorType((2, 3), I32), TensorType((3,), I32),
            TensorType((2,), I32), HostIntsType(3), HostIntsType(2))


def write_types(e: int, s: int) -> tuple[Any, ...]:
    cache, new = TensorType((4, s, 2, e), HALF, "nz"), TensorType((3, 2, e), HALF)
    return cache, cache, new, new, TensorType((3,), I32)


def rope_types(h: int, p: int, e: int = 2048) -> tuple[Any, ...]:
    return TensorType((3, h, e), HALF), TensorType((3, p), F32), TensorType((3, p), F32)


def fused_types(h: int, k: int, p: int, e: int) -> tuple[Any, ...]:
    cache = TensorType((4, 128, k, e), HALF)
    angle = TensorType((3, p), F32)
    return TensorType((3, (h + 2 * k) * e), HALF), angle, angle, cache, cache, TensorType((3,), I32)


SCALE, ROPE = {"scale": 1.0}, {"interleaved": False}
# op, kernel, chip -> types that the vendor takes, and types just beyond, each beyond one limit only
LIMITS: dict[tuple[str, str, str], tuple[list[Any], list[Any], dict[str, Any]]] = {
    ("paged_attention", "fia", "a2"): (
        [attention_types(*x) for x in ((64, 1, 512, 512), (1, 1, 16, 128), (127, 127, 512, 384), (66, 2, 16, 128))],
        [attention_types(*x) for x in ((65, 1, 16, 128), (130, 2, 16, 128), (1, 1, 528, 128), (1, 1, 24, 128),
                                       (1, 1, 16, 640), (1, 1, 16, 64), (128, 128, 512, 128), (4096, 4096, 16, 128))],
        SCALE),
    ("paged_attention", "atb", "a2"): (
        [attention_types(64, 1, 512, 128)], [attention_types(64, 1, 512, 256), attention_types(65, 1, 512, 128)],
        SCALE),
    ("paged_attention", "atb_nz", "310p"): (
        [attention_types(4, 2, *x, "nz") for x in ((128, 128), (256, 64), (16, 16), (16, 1024))],
        [attention_types(4, 2, *x, "nz") for x in ((144, 128), (256, 80), (272, 16), (24, 16), (16, 24), (16, 1040))],
        SCALE),
    ("write_kv", "atb_nz", "310p"): (
        [write_types(*x) for x in ((128, 128), (256, 64), (16, 16), (16, 1024))],
        [write_types(*x) for x in ((144, 128), (256, 80), (272, 16), (24, 16), (16, 24), (16, 1040))], {}),
    ("rope", "npu_rotary_mul", "a2"): (
        [rope_types(999, 447), rope_types(1, 1), rope_types(999, 1), rope_types(1, 447)],
        [rope_types(1000, 1), rope_types(1, 448), rope_types(1, 1000)], ROPE),
    ("rope", "npu_apply_rotary", "310p"): (
        [rope_types(1, 64), rope_types(1, 1), rope_types(5, 33)], [rope_types(1, 65), rope_types(5, 448)], ROPE),
    ("qkv_rope_write", "npu_rotary_mul", "a2"): (
        [fused_types(998, 1, 8, 16), fused_types(900, 99, 8, 16), fused_types(1, 1, 447, 1024)],
        [fused_types(999, 1, 8, 16), fused_types(900, 100, 8, 16), fused_types(1, 1, 448, 1024)], ROPE),
}


@pytest.mark.parametrize("key", LIMITS, ids="-".join)
def test_a_kernel_takes_what_lies_at_a_limit_of_the_vendor_and_nothing_beyond(key: tuple[str, str, str]):
    op, name, chip = key
    good, bad, params = LIMITS[key]
    if op == "qkv_rope_write":
        params = params | {"h": 0, "e": 0}
    for types, taken in [(t, True) for t in good] + [(t, False) for t in bad]:
        if op == "qkv_rope_write":
            e = types[3].shape[3]
            params = {"h": types[0].shape[1] // e - 2 * types[3].shape[2], "e": e, "interleaved": False}
        why = rejection(kernel_of(op, name), types, tuple(params.items()), plugins.chip(chip))
        assert (why is None) is taken, f"{', '.join(map(str, types[:2]))}: {why}"


def test_every_npu_kernel_with_a_condition_on_sizes_is_in_the_table():
    conditions = {(o.name, k.name) for o in ops.registered().values() for k in o.kernels
                  if k.when not in (None, one_dtype) and k.needs & NPU_FEATURES}
    assert conditions == {key[:2] for key in LIMITS}


def seen(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of the calls of a vendor operator by a module, from now on."""
    space = next(s for s in ("npu", "atb") if hasattr(module, s))
    real, calls = getattr(getattr(module, space), name), []

    def call(*args: Any, **more: Any) -> Any:
        calls.append((args, more))
        return real(*args, **more)

    monkeypatch.setitem(vars(getattr(module, space)), name, call)
    return calls


def attention(q_lens: list[int], kv_lens: list[int], tokens: int, s: int) -> tuple[Any, ...]:
    rng, r = Rng(3), len(q_lens)
    start = torch.tensor([0, *q_lens]).cumsum(0).to(I32)
    lens = torch.tensor(kv_lens, dtype=I32)
    caches = [rng.normal(2 * r + 1, s, 2, 16).half() for _ in range(2)]
    return (rng.normal(tokens, 4, 16).half(), *caches, torch.arange(2 * r, dtype=I32).view(r, 2) + 1, start, lens,
            HostInts(start.numpy()), HostInts(lens.numpy()))


@pytest.mark.parametrize("tokens", (4, 5, 9))
def test_fused_attention_of_more_tokens_than_rows_has_one_more_request_and_zeros_only_for_padding(monkeypatch, tokens):
    """The request is there without padding too, empty, so that the lists are as long as a captured call has them."""
    calls = seen(monkeypatch, fia, "npu_fused_infer_attention_score")
    args = attention([3, 1], [130, 2], tokens, 128)
    got = fia.attend(*args, scale=0.25)
    ((_, more),) = calls
    padded = tokens > 4
    assert more["actual_seq_lengths"] == [3, 4, tokens]
    assert more["actual_seq_lengths_kv"] == [130, 2, 1]
    assert more["block_table"].tolist() == [[1, 2], [3, 4], [0, 0]]
    assert more["inner_precise"] == 2 * padded
    assert torch.allclose(got.float(), paged_attention.reference(*args, scale=0.25).float(), atol=2e-3)


def test_fused_attention_gives_a_row_without_tokens_the_length_one(monkeypatch):
    calls = seen(monkeypatch, fia, "npu_fused_infer_attention_score")
    fia.attend(*attention([2, 0, 0], [2, 0, 0], 3, 128), scale=0.25)
    assert calls[0][1]["actual_seq_lengths_kv"] == [2, 1, 1] and calls[0][1]["actual_seq_lengths"] == [2, 3, 3]
    assert len(calls[0][1]["block_table"]) == 3, "padding rows take the padding tokens"


@pytest.mark.parametrize(("t", "starts", "lens", "ends", "kept"), [
    (4, [0, 1, 2, 2, 2], [9, 5, 0, 0], [1, 2, 3, 4], [9, 5, 1, 1]),             # decode, two rows of padding
    (4, [0, 0, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4], [1, 1, 1, 1]),             # nothing but padding: a capture
    (4, [0, 3, 3, 3, 3], [8, 0, 0, 0], [3, 4, 4, 4], [8, 1, 1, 1]),
    (2, [0, 1, 1, 1, 1], [7, 0, 0, 0], [1, 2, 2, 2], [7, 1, 1, 1]),             # fewer tokens than rows
    (8, [0, 3, 3, 3, 3], [8, 0, 0, 0], [3, 3, 3, 3, 8], [8, 1, 1, 1, 1]),
    (3, [0, 1, 3], [4, 9], [1, 3, 3], [4, 9, 1]),
])
def test_lengths_of_fused_attention_are_as_many_as_the_sizes_say(t, starts, lens, ends, kept):
    q, k, v, table, *_ = attention_types(4, 2, 16, 128)
    operands = attrs.evolve(q, shape=(t, 4, 16)), k, v, table, None, None, HostInts(starts), HostInts(lens)
    assert fia.lengths(*operands, scale=1.0) == {"actual_seq_lengths": ends, "actual_seq_lengths_kv": kept}


def test_padding_tokens_without_padding_rows_are_refused():
    with pytest.raises(AflError, match="1 padding tokens have no padding rows"):
        fia.lengths(attention_types(4, 2, 16, 128)[0], HostInts([0, 1, 1, 2]), HostInts([3, 3, 3]), scale=1.0)


@pytest.mark.parametrize("lens", ([1, 2, 0], [1, 0, 0], [130, 1, 2]))
def test_decode_by_host_lengths_keeps_a_row_of_one_key_and_zeroes_rows_of_none(lens: list[int]):
    args = attention([int(n > 0) for n in lens], lens, 3, 128)
    got = atb_paged._attend(*args, scale=0.25)
    assert torch.allclose(got.float(), paged_attention.reference(*args, scale=0.25).float(), atol=2e-3)


@pytest.mark.parametrize(("tokens", "padded"), [(1, 16), (16, 16), (17, 32)])
def test_nz_attention_pads_to_sixteen_tokens_and_names_its_mask(monkeypatch, tokens: int, padded: int):
    calls = seen(monkeypatch, atb_nz, "_npu_paged_attention_splitfuse_v2")
    q, k, v, *rest = attention([tokens], [tokens + 3], tokens, 16)
    k, v = (layout("nz").to(x) for x in (k, v))
    atb_nz.attend(q, k, v, *rest, scale=0.25)
    ((args, more),) = calls
    assert len(args[0]) == len(more["out"]) == padded and more["mask_type"] == 5


@pytest.mark.parametrize("make", [fia.causal_mask, atb_nz.causal_mask])
def test_a_mask_lies_on_the_device_that_asks(make: Any):
    mask: Tensor = make.__wrapped__(torch.device("meta"))
    assert mask.device.type == "meta" and mask.shape == (2048, 2048)


@pytest.mark.parametrize(("f", "width"), [(16, 32), (48, 96), (20, 64), (1, 32), (17, 64)])
def test_the_gate_is_given_halves_that_fill_sixteen_channels_and_no_more(monkeypatch, f: int, width: int):
    calls = seen(monkeypatch, npu_act, "npu_swiglu")
    x = Rng(3).normal(5, 2 * f).half()
    got = npu_act._swiglu(x)
    assert torch.allclose(got.float(), swiglu.reference(x).float(), atol=2e-3)
    assert [args[0].shape[-1] for args, _ in calls] == [width]


@pytest.mark.parametrize("name", ("npu_rotary_mul", "npu_apply_rotary"))
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize(("p", "e"), [(8, 24), (1, 3), (40, 80), (40, 96), (33, 70), (64, 128), (2, 4)])
def test_rotation_of_any_part_of_a_head_equals_the_reference(name: str, interleaved: bool, p: int, e: int):
    rng = Rng(3)
    x, angle = rng.normal(3, 2, e).half(), rng.normal(3, p)
    args = x, angle.cos(), angle.sin()
    got = kernel_of("rope", name).fn(*args, interleaved=interleaved)
    assert torch.allclose(got.float(), rope.reference(*args, interleaved=interleaved).float(), atol=4e-3)
