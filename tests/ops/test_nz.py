"""310P: NZ weights and caches through the vendor's operators, against float64; what those operators refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import normal
from test_emulation import nearly, required
from torch import Tensor

from afl import plugins
from afl.errors import NoKernel, VendorRefusal
from afl.ir.kernel import choose
from afl.layout import layout, plain
from afl.ops.attention import paged_attention
from afl.ops.caches.paged_kv import PagedKVSpec
from afl.ops.kernels.atb_nz import causal_mask
from afl.ops.linear import linear
from afl.ops.nz import memory
from afl.ops.vendor import atb, npu
from afl.types import HostIntsType, TensorType

plugins.load_ops()
HALF = torch.float16
NZ = layout("nz")
MASK = torch.full((2048, 2048), -10000.0, dtype=HALF).triu(1)


def half(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, dtype=HALF, seed=seed)


def i32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [t h e], the last tokens of k, v [n k e], in float64, one query at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        n = len(k) - len(q) + i + 1
        for h in range(q.shape[1]):
            p = ((k[:n, h // group].double() @ q[i, h].double()) * scale).softmax(0)
            out[i, h] = p @ v[:n, h // group].double()
    return out


def stored(x: Tensor) -> Tensor:
    return memory(NZ.to(x))


# ---- weights --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_a_product_has_the_same_bits_over_an_nz_weight(t: int, o: int, i: int, biased: bool):
    x, w, bias = half(t, i), half(o, i, seed=1), half(o, seed=2) if biased else None
    assert torch.equal(npu.npu_linear(x, NZ.to(w), bias), npu.npu_linear(x, w, bias))


def test_a_changed_weight_is_seen_by_the_next_product():
    x, w = half(3, 40), half(50, 40, seed=1)
    kept = NZ.to(w)
    npu.npu_linear(x, kept)
    NZ.put(kept, w[:7] * 2, 20)
    w[20:27] = w[:7] * 2
    assert torch.equal(npu.npu_linear(x, kept), npu.npu_linear(x, w))


def test_format_cast_keeps_shape_and_values_and_another_operator_sees_scrambled_ones():
    x = half(40, 48)
    nz = npu.npu_format_cast(x, 29)
    assert nz.shape == x.shape and nz.afl_fmt == "nz" and torch.equal(plain(nz), x)
    back = npu.npu_format_cast(nz, 2)
    assert not hasattr(back, "afl_fmt") and torch.equal(back, x)
    assert torch.equal(plain(npu.npu_format_cast(nz, 29)), x)
    copy = npu.npu_format_cast(x, 2)
    assert torch.equal(copy, x) and copy.data_ptr() != x.data_ptr()
    assert not torch.equal(npu.npu_swiglu(nz), npu.npu_swiglu(x))


@pytest.mark.parametrize("shape", [(1, 64), (64, 1)])
def test_one_row_or_one_column_is_computed_plain(shape: tuple[int, int]):
    """A shared expert's gate has one output."""
    w = NZ.to(half(*shape))
    types = TensorType((3, shape[1]), HALF), TensorType(shape, HALF, NZ.fmt_of(shape)), None
    assert choose(linear, types, (), plugins.chip("310p")).name == "npu_linear" and not hasattr(w, "afl_fmt")


# ---- caches ---------------------------------------------------------------------------------------------------------


def test_a_slot_is_written_where_attention_reads_it():
    k, v = half(5, 64, 2, 32), half(5, 64, 2, 32, seed=1)
    nk, nv = NZ.to(k), NZ.to(v)
    key, value, slots = half(4, 2, 32, seed=2), half(4, 2, 32, seed=3), i32(70, -1, 319, 64)
    assert atb._npu_reshape_and_cache(key, value, memory(nk), memory(nv), slots) is None
    for new, was in ((key, k), (value, v)):
        was[1, 6], was[4, 63], was[1, 0] = new[0], new[2], new[3]
    assert torch.equal(plain(nk), k) and torch.equal(plain(nv), v)
    atb._npu_reshape_and_cache(key, value, memory(nk), memory(nv), i32(-1, -1, -1, -1))
    assert torch.equal(plain(nk), k)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=4), st.integers(0, 20),
       st.sampled_from([(1, 1, 16), (2, 4, 16), (1, 3, 48), (4, 4, 32)]))
def test_splitfuse_is_causal_attention_of_each_request(
    lengths: list[tuple[int, int]], padding: int, heads: tuple[int, int, int]
):
    k, h, e = heads
    counts = [q for q, _ in lengths]
    kept = [q + c if q else 0 for q, c in lengths]
    t = -(-(sum(counts) + padding) // 16) * 16 or 16
    r, s = len(counts), 32
    table = (torch.randperm(2 * r, generator=torch.Generator().manual_seed(t)) + 1).view(r, 2).int()
    keys, values = half(2 * r + 1, s, k, e), half(2 * r + 1, s, k, e, seed=1)
    q, out = half(t, h, e, seed=2), half(t, h, e, seed=3)
    atb._npu_paged_attention_splitfuse_v2(
        q, stored(keys), stored(values), table, i32(*kept), MASK, i32(*counts), k, h, 0.25, out=out)
    at = 0
    for i, (n, m) in enumerate(zip(counts, kept, strict=True)):
        mine = [x[table[i].long()].flatten(0, 1)[:m] for x in (keys, values)]
        want = exact(q[at : at + n], *mine, 0.25)
        nearly(out[at : at + n], want, want.abs().clamp(min=1))
        at += n
    assert out[at:].isnan().all(), "what belongs to no request is undefined"


def test_the_mask_serves_sequences_longer_than_itself():
    """2048 rows and columns; 2300 cached tokens, of which the last 40 are new."""
    k, v, q = half(19, 128, 1, 16), half(19, 128, 1, 16, seed=1), half(48, 2, 16, seed=2) * 4
    out = torch.empty_like(q)
    table = torch.arange(1, 19, dtype=torch.int32)[None]
    atb._npu_paged_attention_splitfuse_v2(q, stored(k), stored(v), table, i32(2300), causal_mask(q.device), i32(40), 1,
                                          2, 0.25, out=out)
    want = exact(q[:40], k[1:].flatten(0, 1)[:2300], v[1:].flatten(0, 1)[:2300], 0.25)
    nearly(out[:40], want, want.abs().clamp(min=1))


def test_the_mask_is_made_once_a_device():
    assert causal_mask(torch.device("cpu")) is causal_mask(torch.device("cpu")) and torch.equal(
        causal_mask(torch.device("cpu")), MASK)


@pytest.mark.parametrize(("e", "block", "taken"), [
    (64, 128, True), (128, 128, True), (256, 64, True), (256, 128, False), (72, 128, False), (272, 48, False),
    (64, 40, False),
])
def test_heads_and_blocks_that_the_vendor_refuses_find_no_kernel(e: int, block: int, taken: bool):
    chip = plugins.chip("310p")
    cache = PagedKVSpec(2, e).types(chip, 9, block, HALF).k
    small = TensorType((3,), torch.int32)
    types = (TensorType((3, 4, e), HALF), cache, cache, TensorType((3, 2), torch.int32),
             TensorType((4,), torch.int32), small, HostIntsType(4), HostIntsType(3))
    if taken:
        assert choose(paged_attention, types, (("scale", 1.0),), chip).name == "atb_nz"
    else:
        with pytest.raises(NoKernel, match="atb_nz .*channels a multiple of 16 up to 256"):
            choose(paged_attention, types, (("scale", 1.0),), chip)


# ---- refusals -------------------------------------------------------------------------------------------------------


def attend(**change: Any) -> None:
    """A good call with some arguments replaced: requests of 3 and 1 tokens over 130 and 2 cached ones."""
    good: dict[str, Any] = dict(
        query=half(16, 4, 16), key_cache=half(5, 2, 128, 16), value_cache=half(5, 2, 128, 16), num_kv_heads=2,
        num_heads=4, scale_value=0.25, block_table=i32([1, 2], [3, 0]), context_lens=i32(130, 2), seq_len=i32(3, 1),
        mask=MASK, out=half(16, 4, 16),
    )
    atb._npu_paged_attention_splitfuse_v2(**good | {k: v(good) if callable(v) else v for k, v in change.items()})


def write(**change: Any) -> None:
    good: dict[str, Any] = dict(
        key=half(3, 2, 16), value=half(3, 2, 16), key_cache=half(5, 2, 16, 16), value_cache=half(5, 2, 16, 16),
        slot_indices=i32(1, 2, 3),
    )
    atb._npu_reshape_and_cache(**good | {k: v(good) if callable(v) else v for k, v in change.items()})


def caches(*shape: int) -> dict[str, Tensor]:
    return dict(key_cache=half(*shape), value_cache=half(*shape))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "format": (lambda: npu.npu_format_cast(half(4, 4), 4), "29"),
    "format of packed types": (lambda: npu.npu_format_cast(half(4, 4), 29, customize_dtype=2), "not emulated"),
    "query rank": (lambda: attend(query=half(16, 64)), "tokens, heads, channels"),
    "query strides": (lambda: attend(query=half(16, 8, 16)[:, :4]), "contiguous"),
    "query dtype": (lambda: attend(query=normal(16, 4, 16)), "float16"),
    "tokens": (lambda: attend(query=half(15, 4, 16), out=half(15, 4, 16)), "multiple of 16 tokens"),
    "heads": (lambda: attend(num_heads=2), "that of query"),
    "groups": (lambda: attend(num_kv_heads=3), "multiple of num_kv_heads"),
    "out shape": (lambda: attend(out=half(16, 4, 8)), "like query"),
    "out dtype": (lambda: attend(out=normal(16, 4, 16)), "like query"),
    "out is query": (lambda: attend(out=lambda a: a["query"]), "must not be query"),
    "cache plain": (lambda: attend(**caches(5, 128, 2, 32)), "NZ"),
    "cache rank": (lambda: attend(**caches(5, 2, 128)), "NZ"),
    "cache shapes": (lambda: attend(value_cache=half(5, 2, 64, 16)), "one shape"),
    "cache dtype": (lambda: attend(value_cache=normal(5, 2, 128, 16)), "float16"),
    "cache strides": (lambda: attend(key_cache=half(5, 4, 128, 16)[:, :2]), "contiguous"),
    "cache shared": (lambda: attend(value_cache=lambda a: a["key_cache"]), "share memory"),
    "cache heads": (lambda: attend(**caches(5, 3, 128, 16)), "all heads"),
    "channels": (lambda: attend(query=half(16, 4, 8), out=half(16, 4, 8), **caches(5, 1, 128, 16)), "multiple of 16"),
    "many channels": (lambda: attend(query=half(16, 4, 272), out=half(16, 4, 272), **caches(5, 34, 16, 16)), "256"),
    "block": (lambda: attend(**caches(5, 2, 40, 16)), "multiple of 16 tokens"),
    "block size": (lambda: attend(query=half(16, 4, 256), out=half(16, 4, 256), **caches(5, 32, 128, 16)), "16384"),
    "mask type": (lambda: attend(mask_type=3), "must be 5"),
    "mask dtype": (lambda: attend(mask=MASK.float()), "float16"),
    "mask shape": (lambda: attend(mask=MASK[:1024]), "2048"),
    "mask values": (lambda: attend(mask=MASK.T.contiguous()), "above the diagonal"),
    "table": (lambda: attend(block_table=torch.zeros(2, 2, dtype=torch.int64)), "int32"),
    "table strides": (lambda: attend(block_table=torch.zeros(2, 4, dtype=torch.int32)[:, :2]), "contiguous"),
    "lengths dtype": (lambda: attend(seq_len=torch.tensor([3, 1])), "int32"),
    "lengths count": (lambda: attend(context_lens=i32(130, 2, 1)), "one a request"),
    "more tokens than cached": (lambda: attend(context_lens=i32(130, 0)), "seq_len <= context_lens"),
    "negative": (lambda: attend(seq_len=i32(-1, 1)), "0 <= seq_len"),
    "beyond the table": (lambda: attend(context_lens=i32(257, 2)), "<= 256"),
    "more tokens than given": (lambda: attend(seq_len=i32(16, 1), context_lens=i32(130, 2)), "more tokens than query"),
    "block id": (lambda: attend(block_table=i32([1, 5], [3, 0])), "0 .. 4"),
    "write shapes": (lambda: write(value=half(3, 2, 32)), "tokens, heads, channels"),
    "write dtype": (lambda: write(key=normal(3, 2, 16)), "float16"),
    "write strides": (lambda: write(key=half(3, 2, 32)[..., :16]), "contiguous"),
    "slots": (lambda: write(slot_indices=torch.tensor([1, 2, 3])), "int32"),
    "slot range": (lambda: write(slot_indices=i32(1, 2, 80)), "below 80"),
    "equal slots": (lambda: write(slot_indices=i32(1, 2, 1)), "distinct"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_310p_does_not_take_is_refused(name: str):
    call, match = REFUSED[name]
    with pytest.raises(VendorRefusal, match=match):
        call()


def test_every_requirement_refuses_something():
    reached = set()
    for call, _ in REFUSED.values():
        try:
            call()
        except VendorRefusal as e:
            t = e.__context__.__traceback__ if e.__context__ else None
            while t is not None:
                reached.add((Path(t.tb_frame.f_code.co_filename).stem, t.tb_lineno))
                t = t.tb_next
    assert not {f"{f}.py:{at} {text}" for f in ("atb", "nz") for at, text in required(f).items()
                if (f, at) not in reached}
