"""The cpu chip's attention and glue: bits depend on the row alone, and memory does not grow with the context."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from afl.ops.act import swiglu
from afl.ops.kernels import numba_attention, numba_glue
from afl.types import HostInts

SHAPES = [(9, 3, 64, 16), (6, 2, 14, 4), (4, 4, 80, 16), (8, 2, 128, 32), (3, 1, 32, 48), (5, 5, 16, 3), (2, 1, 48, 1),
          (7, 1, 96, 128)]       # query heads, kv heads, channels, tokens of a block


def cache(rows, longest, k, e, s, seed=0):
    """Caches whose unused parts are NaN, tables, and new keys of each row written."""
    rng = torch.Generator().manual_seed(seed)
    w = -(-longest // s)
    table = (torch.randperm(rows * w, generator=rng) + 1).int().reshape(rows, w)
    k_cache, v_cache = (torch.randn(1 + rows * w, s, k, e, generator=rng) for _ in range(2))
    return k_cache, v_cache, table


def blank(k_cache, v_cache, table, lens):
    """The caches with NaN behind every row's end: nothing of it may reach a result."""
    s = k_cache.shape[1]
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    for row, n in zip(table.tolist(), lens, strict=True):
        for i, block in enumerate(row):
            for c in (k_cache, v_cache):
                c[block, max(0, min(s, n - i * s)) :] = torch.nan
    return k_cache, v_cache


def attend(q, caches, table, counts, lens):
    starts = np.cumsum([0, *counts]).astype(np.int32)
    lens = np.array(lens, np.int32)
    return numba_attention._paged_attention(
        q, *blank(*caches, table, lens), table, torch.from_numpy(starts), torch.from_numpy(lens), HostInts(starts),
        HostInts(lens), scale=0.3)


def threads(n):
    torch.set_num_threads(n)


@pytest.fixture(autouse=True)
def _restore():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("h,k,e,s", SHAPES)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 100, 161])
def test_a_tokens_bits_do_not_depend_on_chunks_company_or_threads(h, k, e, s, n):
    k_cache, v_cache, table = cache(3, n, k, e, s)
    q = torch.randn(n, h, e, generator=torch.Generator().manual_seed(1)) * 3
    whole = attend(q, (k_cache, v_cache), table[:1], [n], [n])
    assert torch.isfinite(whole).all()
    rng = np.random.default_rng(n)
    at = 0
    while at < n:                                    # any chunks, together with two other rows, on 2 threads
        count = int(rng.integers(1, n - at + 1)) if rng.random() < 0.7 else 1
        others = [int(rng.integers(1, n + 1)) for _ in range(2)]
        order = [0, 1, 2] if at % 2 else [1, 0, 2]
        tokens = {0: q[at : at + count], 1: torch.randn(1, h, e), 2: torch.randn(others[1], h, e)}
        lens = {0: at + count, 1: others[0], 2: others[1]}
        threads(1 + at % 2)
        y = attend(torch.cat([tokens[r] for r in order]), (k_cache, v_cache), table[order],
                   [len(tokens[r]) for r in order], [lens[r] for r in order])
        first = sum(len(tokens[r]) for r in order[: order.index(0)])
        assert torch.equal(y[first : first + count], whole[at : at + count]), (at, count)
        at += count


@pytest.mark.parametrize("h,k,e,s", SHAPES)
def test_attention_equals_that_of_float64(h, k, e, s):
    counts, lens = [70, 1, 0, 5], [131, 97, 0, 5]
    k_cache, v_cache, table = cache(4, 140, k, e, s)
    q = torch.randn(sum(counts), h, e, generator=torch.Generator().manual_seed(2)) * (8 / e**0.5)
    y = attend(q, (k_cache, v_cache), table, counts, lens)
    starts = np.cumsum([0, *counts])
    for row, n in enumerate(lens):
        keys, values = (c[table[row].long()].flatten(0, 1)[:n].double().repeat_interleave(h // k, 1)
                        for c in (k_cache, v_cache))
        for i in range(counts[row]):
            seen = n - counts[row] + i + 1
            p = (torch.einsum("he,nhe->hn", q[starts[row] + i].double(), keys[:seen]) * 0.3).softmax(-1)
            want = torch.einsum("hn,nhe->he", p, values[:seen])
            assert torch.allclose(y[starts[row] + i].double(), want, rtol=0, atol=2e-6 * values.abs().max())


def test_padding_yields_zeros_and_large_scores_do_not_overflow():
    k_cache, v_cache, table = cache(1, 40, 1, 32, 16)
    q = torch.randn(5, 1, 32) * 1e4
    y = numba_attention._paged_attention(
        q, k_cache, v_cache, table, None, None, HostInts([0, 3]), HostInts([40]), scale=1.0)  # type: ignore[arg-type]
    assert torch.isfinite(y).all() and not y[3:].any() and y[:3].any()
    scores = torch.einsum("the,ne->tn", q[:3, :].double(), k_cache[table[0].long()].flatten(0, 1)[:40, 0].double())
    scores = scores.masked_fill(torch.arange(40) > torch.arange(37, 40)[:, None], -torch.inf)
    want = scores.softmax(-1) @ v_cache[table[0].long()].flatten(0, 1)[:40, 0].double()
    assert torch.allclose(y[:3, 0].double(), want, atol=1e-2)


PEAK = """
import numpy as np, torch
from afl.ops.kernels import numba_attention as a
from afl.types import HostInts
torch.set_num_threads(2)
n, rows = 8192, 4
table = torch.arange(1, 1 + rows * n // 16).int().reshape(rows, -1)
k, v = (torch.ones(1 + rows * n // 16, 16, 3, 64) for _ in range(2))
def high():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])
def step(length, count):
    q = torch.ones(rows * count, 9, 64)
    a._paged_attention(q, k, v, table, None, None, HostInts(np.arange(rows + 1) * count), HostInts([length] * rows),
                       scale=1.0)
for _ in range(8):
    step(1024, 1); step(1024, 64)
before = high()
step(n, 1); step(n, 64)
print(high() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_step_at_8k_is_that_at_1k():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    # a copy of the keys of one head would be 2 MB, the scores of one row 295 kB
    assert int(done.stdout) <= 256, f"{done.stdout} kB more"


@pytest.mark.parametrize("f", [1, 15, 16, 40, 1536])
def test_gates_of_many_rows_are_those_of_each_and_right(f):
    x = torch.randn(100, 2 * f, generator=torch.Generator().manual_seed(3)) * 20
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = torch.nan, torch.inf, 100.0, -100.0
    threads(2)
    y = numba_glue._swiglu(x)
    each = torch.cat([numba_glue._swiglu(row[None]) for row in x])
    assert torch.equal(y.nan_to_num(7.0), each.nan_to_num(7.0))
    want = swiglu.reference(x.double())
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.allclose(y.double(), want, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_glue_of_many_rows_is_that_of_each():
    rng = torch.Generator().manual_seed(4)
    t, d, h, k, e = 70, 48, 6, 2, 16
    x, r, g = (torch.randn(n, d, generator=rng) for n in (t, t, 1))
    threads(2)
    y = numba_glue._rms_norm(x, g[0], eps=1e-5)
    assert torch.equal(y, torch.cat([numba_glue._rms_norm(row[None], g[0], eps=1e-5) for row in x]))
    y, s = numba_glue._add_rms_norm(x, r, g[0], eps=1e-5)
    pairs = [numba_glue._add_rms_norm(a[None], b[None], g[0], eps=1e-5) for a, b in zip(x, r, strict=True)]
    assert torch.equal(y, torch.cat([p[0] for p in pairs])) and torch.equal(s, torch.cat([p[1] for p in pairs]))
    qkv, cos, sin = torch.randn(t, (h + 2 * k) * e, generator=rng), torch.randn(t, e // 2), torch.randn(t, e // 2)
    slot = torch.randperm(20 * 4, generator=rng)[:t].int()
    slot[5] = -1
    caches = [[torch.zeros(20, 4, k, e) for _ in range(2)] for _ in range(2)]
    q, *_ = numba_glue._qkv_rope_write(qkv, cos, sin, *caches[0], slot, h=h, e=e, interleaved=False)
    alone = [numba_glue._qkv_rope_write(qkv[i : i + 1], cos[i : i + 1], sin[i : i + 1], *caches[1], slot[i : i + 1],
                                        h=h, e=e, interleaved=False)[0] for i in range(t)]
    assert torch.equal(q, torch.cat(alone))
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True)) and caches[0][0].any()
