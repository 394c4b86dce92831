"""Vendor attention on CPU against dense attention in float64, over drawn lengths, tables and masks."""

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import DENSE, MASK, fia, normal, paged
from torch import Tensor

from afl import plugins
from afl.ir.kernel import explain
from afl.ops.attention import paged_attention
from afl.ops.vendor import atb, npu
from afl.types import HostInts, type_of

EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@attrs.frozen(eq=False)
class Batch:
    """Requests with their keys, also laid out in shuffled pages; unused slots hold large numbers."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    counts: list[int]
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor

    @property
    def ends(self) -> list[int]:
        return np.cumsum(self.counts).tolist()

    @property
    def lens(self) -> list[int]:
        return [len(x) for x in self.keys]


def batch(counts: list[int], lens: list[int], k: int, group: int, e: int, s: int, dtype: Any, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    width = max(-(-n // s) for n in lens)
    blocks = 1 + width * len(lens)
    order = torch.randperm(blocks - 1, generator=g) + 1
    table = order.view(len(lens), width).to(torch.int32)
    caches = [torch.full((blocks, s, k, e), 3e4, dtype=dtype) for _ in range(2)]
    rows = [[rand(n, k, e) for n in lens] for _ in range(2)]
    for cache, new in zip(caches, rows, strict=True):
        for i, x in enumerate(new):
            for j in range(len(x)):
                cache[table[i, j // s], j % s] = x[j]
    return Batch(rand(sum(counts), k * group, e), *rows, counts, *caches, table)


def dense(q: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of one request in float64; seen [t n]."""
    group = q.shape[1] // key.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (key, value))
    z = (torch.einsum("the,nhe->htn", q.double(), k) * scale).masked_fill(~seen, -torch.inf)
    out = torch.einsum("htn,nhe->the", z.softmax(-1).nan_to_num(0.0), v)
    return out, z.logsumexp(-1).T


def visible(t: int, n: int, mode: int, before: int, after: int) -> Tensor:
    """Which of n keys each of t queries sees, written from the documentation of the modes."""
    i, j = torch.arange(t)[:, None], torch.arange(n)[None]
    return {0: j >= 0, 2: j <= i, 3: j <= i + n - t,
            4: (j >= i + n - t - before) & (j <= i + n - t + after)}[mode].expand(t, n)


def check(b: Batch, out: Tensor, lse: Tensor, mode: int, before: int = 0, after: int = 0) -> None:
    a, e = 0, b.q.shape[2]
    for t, key, value in zip(b.counts, b.keys, b.values, strict=True):
        want, total = dense(b.q[a : a + t], key, value, visible(t, len(key), mode, before, after), e**-0.5)
        off = (out[a : a + t].double() - want).abs() - EPS[out.dtype] * want.abs() - 1e-5
        assert t == 0 or off.max() <= 0, f"tokens {a} .. {a + t - 1}: off by {float(off.max())}"
        assert torch.allclose(lse[a : a + t, :, 0].double(), total, atol=1e-4, rtol=1e-5)
        a += t


def call(b: Batch, mode: int, table: bool = True, **more: Any) -> tuple[Tensor, Tensor]:
    k, s = b.k_cache.shape[2], b.k_cache.shape[1]
    if table:
        pages = dict(key=b.k_cache.flatten(2), value=b.v_cache.flatten(2), block_table=b.table, block_size=s,
                     actual_seq_lengths_kv=b.lens)
    else:
        pages = dict(key=torch.cat(b.keys), value=torch.cat(b.values), block_table=None, block_size=0,
                     actual_seq_lengths_kv=np.cumsum(b.lens).tolist())
    args = dict(query=b.q, actual_seq_lengths=b.ends, num_heads=b.q.shape[1], num_key_value_heads=k, inner_precise=2,
                scale=b.q.shape[2] ** -0.5, sparse_mode=mode, atten_mask=MASK if mode else None, softmax_lse_flag=True)
    return fia(**pages | args | more)


lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=4).filter(
    lambda rows: any(t for t, _ in rows))


@settings(max_examples=30, deadline=None)
@given(lengths, st.sampled_from([(1, 1), (2, 3), (3, 1)]), st.sampled_from([16, 48]), st.sampled_from([128, 256]),
       st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from([0, 2, 3]))
def test_paged_and_dense_calls_equal_attention_in_float64(rows, heads, e, s, dtype, mode):
    counts = [t for t, _ in rows]
    b = batch(counts, [max(1, t + context) for t, context in rows], *heads, e, s, dtype)
    out, lse = call(b, mode)
    assert out.dtype == dtype and lse.dtype == torch.float32 and lse.shape == (*out.shape[:2], 1)
    check(b, out, lse, mode)
    again, same = call(b, mode, table=False)
    assert torch.equal(again, out) and torch.equal(same, lse)


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(0, 12), st.integers(0, 3))
def test_a_band_keeps_the_tokens_before_and_the_current_one(rows, before, after):
    counts = [t for t, _ in rows]
    b = batch(counts, [max(1, t + context) for t, context in rows], 2, 2, 16, 128, torch.bfloat16)
    check(b, *call(b, 4, pre_tokens=before, next_tokens=after), 4, before, after)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=5), st.sampled_from([(1, 1), (2, 3)]),
       st.sampled_from([16, 32, 128]), st.sampled_from([torch.bfloat16, torch.float16]))
def test_decode_by_either_operator_equals_attention_in_float64(lens, heads, s, dtype):
    b = batch([1] * len(lens), lens, *heads, 32, s, dtype)
    out, lse = call(b, 3)
    check(b, out, lse, 3)
    other = torch.empty_like(b.q)
    host = torch.tensor(lens, dtype=torch.int32)
    atb._npu_paged_attention(b.q, b.k_cache, b.v_cache, heads[0], b.q.shape[1], 32**-0.5, b.table, host, other)
    assert torch.equal(other, out)


def test_decode_reads_caches_in_fractals():
    """NZ of 310P: [blocks, k*e/16, block_tokens, 16]."""
    b = batch([1, 1], [130, 3], 2, 2, 32, 128, torch.float16)
    nz = [x.flatten(2).unflatten(2, (-1, 16)).transpose(1, 2).contiguous() for x in (b.k_cache, b.v_cache)]
    out = torch.empty_like(b.q)
    atb._npu_paged_attention(b.q, *nz, 2, 4, 32**-0.5, b.table, torch.tensor(b.lens, dtype=torch.int32), out)
    assert torch.equal(out, call(b, 3)[0])


def test_a_query_without_keys_gives_zeros_only_where_that_is_asked_for():
    """Mode 3 with three tokens over one key: the first two see none."""
    more = dict(actual_seq_lengths_kv=[1, 2], softmax_lse_flag=True)
    fixed, lse = fia(**more, inner_precise=2)
    plain, _ = fia(**more)
    assert (fixed[:2] == 0).all() and lse[:2].isneginf().all() and plain[:2].isnan().all()
    assert torch.equal(fixed[2:], plain[2:]) and (fixed[2:] != 0).all()


def test_stale_lengths_give_the_stale_answer():
    new, stale = fia(actual_seq_lengths_kv=[130, 2])[0], fia(actual_seq_lengths_kv=[129, 2])[0]
    assert not torch.equal(new[:3], stale[:3]) and torch.equal(new[3:], stale[3:])
    old = paged(context_lens=torch.tensor([129, 2], dtype=torch.int32))
    assert not torch.equal(old[0], paged()[0]) and torch.equal(old[1], paged()[1])


def test_without_the_flag_the_log_sum_is_empty():
    assert fia()[1].shape == (0,) and fia()[1].dtype == torch.float32


def test_dense_keys_may_differ_from_values_in_width():
    """Heads of 32 channels whose values have 16."""
    q, key, value = normal(4, 4, 32), normal(7, 2, 32, seed=1), normal(7, 2, 16, seed=2)
    out, lse = fia(**DENSE | dict(query=q, key=key, value=value), softmax_lse_flag=True)
    assert out.shape == (4, 4, 16)
    want, total = dense(q[:3], key[:5], value[:5], visible(3, 5, 3, 0, 0), 0.25)
    assert torch.allclose(out[:3].double(), want, rtol=2**-8, atol=1e-5)
    assert torch.allclose(lse[:3, :, 0].double(), total, atol=1e-4)


# ---- the kernels over it --------------------------------------------------------------------------------------------


def kernel(name: str) -> Any:
    plugins.load_ops()
    return next(k for k in paged_attention.kernels if k.name == name)


@pytest.mark.parametrize("name", ("fia", "atb"))
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 200)), min_size=1, max_size=4), st.integers(0, 3),
       st.integers(0, 4), st.booleans())
def test_kernels_take_padding_tokens_and_padding_rows(name, rows, more_rows, more_tokens, single):
    """Padding rows have no tokens and length 0, padding tokens come last and give zeros whatever they hold."""
    counts = [1 if single else t for t, _ in rows]
    lengths_ = [t + context for t, (_, context) in zip(counts, rows, strict=True)]
    b = batch(counts, lengths_, 2, 2, 16, 128, torch.bfloat16)
    q = torch.cat([b.q, torch.full((more_tokens, 4, 16), torch.nan, dtype=b.q.dtype)])
    table = torch.cat([b.table, torch.zeros(more_rows, b.table.shape[1], dtype=torch.int32)])
    starts = HostInts([0, *b.ends, *[len(b.q)] * more_rows])
    lens = HostInts([*b.lens, *[0] * more_rows])
    out = kernel(name).fn(q, b.k_cache, b.v_cache, table, starts.tensor, lens.tensor, starts, lens, scale=0.25)
    want = torch.cat([dense(x, k, v, visible(len(x), len(k), 3, 0, 0), 0.25)[0]
                      for x, k, v in zip(b.q.split(counts), b.keys, b.values, strict=True)])
    assert torch.allclose(out[: len(b.q)].double(), want, rtol=2**-8, atol=1e-5)
    assert out.shape == q.shape and (out[len(b.q) :] == 0).all()


def test_the_host_tensor_kernel_is_an_option_of_the_chip():
    b = batch([1], [5], 2, 2, 16, 128, torch.bfloat16)
    starts, lens = HostInts([0, 1]), HostInts([5])
    types = tuple(map(type_of, (b.q, b.k_cache, b.v_cache, b.table, starts.tensor, lens.tensor, starts, lens)))
    a3 = plugins.chip("a3")
    turned = attrs.evolve(a3, name="a3_atb", prefer={"paged_attention": ("atb", "fia")})
    chosen = {c.name: explain(paged_attention, types, (("scale", 0.25),), c).chosen for c in (a3, turned)}
    assert {n: k.name for n, k in chosen.items() if k} == {"a3": "fia", "a3_atb": "atb"}


@pytest.mark.parametrize("counts,operator", (([1, 1], "_npu_paged_attention"), ([2, 1], "npu_fused_infer")))
def test_the_host_tensor_kernel_leaves_rows_of_several_tokens_to_the_fused_one(counts, operator, monkeypatch):
    b = batch(counts, [5, 6], 2, 2, 16, 128, torch.bfloat16)
    seen = []
    for space, full in ((npu, "npu_fused_infer_attention_score"), (atb, "_npu_paged_attention")):
        real = getattr(space, full)
        monkeypatch.setattr(space, full, lambda *a, _real=real, _n=full, **p: (seen.append(_n), _real(*a, **p))[1])
    starts, lens = HostInts([0, *b.ends]), HostInts(b.lens)
    kernel("atb").fn(b.q, b.k_cache, b.v_cache, b.table, starts.tensor, lens.tensor, starts, lens, scale=0.25)
    assert len(seen) == 1 and seen[0].startswith(operator)
