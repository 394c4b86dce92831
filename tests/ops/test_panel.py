"""Products with weights in panels: odd sizes, threads, forks, processors without vector conversions."""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import afl
from afl.config import forked
from afl.ops.kernels import panel
from afl.ops.panels import PANEL

SIZES = dict(hidden_size=512, intermediate_size=600, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
             head_dim=64, vocab_size=1500, max_position_embeddings=64, tie_word_embeddings=True)
PROMPTS = [[5, 6, 7], [1] * 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("o", [0, 1, 31, 32, 33, 70])
@pytest.mark.parametrize("k", [0, 1, 3, 4, 5, 37])
def test_any_size_gives_the_exact_product_within_rounding(o, k, dtype):
    made = torch.Generator().manual_seed(o * 100 + k)
    w = torch.randn(o, k, generator=made).to(dtype)
    for m in (0, 1, 2, 3, 7, 8, 15, 17):
        x = torch.randn(k, m, generator=made).T                    # not contiguous
        got, want = panel.multiply(x, PANEL.to(w)), x.double() @ w.double().T
        assert got.shape == (m, o) and got.dtype == torch.float32
        room = (k + 1) * 2.0**-24 * (x.double().abs() @ w.double().abs().T)
        assert bool(((got - want).abs() <= room).all())


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads():
    w, x = PANEL.to(torch.randn(1003, 577)), torch.randn(19, 577)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = panel.multiply(x, w)
        for n in (2, 1, 2):
            torch.set_num_threads(n)
            assert torch.equal(panel.multiply(x, w), want)
            for i, s in itertools.product((0, 7), (1, 2, 5, 8)):
                assert torch.equal(panel.multiply(x[i : i + s], w), want[i : i + s])
    finally:
        torch.set_num_threads(before)


def test_what_is_not_a_number_stays_in_its_row():
    w, x = PANEL.to(torch.randn(40, 9)), torch.randn(5, 9)
    want = panel.multiply(x, w)
    x[1, 3], x[3, 0] = float("nan"), float("inf")
    got = panel.multiply(x, w)
    assert torch.equal(got[[0, 2, 4]], want[[0, 2, 4]]) and bool(got[1].isnan().all())
    assert not bool(got[3].isfinite().any())


def test_the_description_of_the_work_lives_until_the_threads_are_done():
    """In place of the threads: a caller that takes all memory that is free and overwrites it, then looks."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    seen = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(share, data, threads, flags):
        held = [(libc.malloc(n), n) for n in range(16, 512, 8) for _ in range(8)]
        for at, n in held:
            ctypes.memset(at, 0xFF, n)
        seen.extend(ctypes.cast(data, ctypes.POINTER(ctypes.c_int64))[:16])
        for at, _ in held:
            libc.free(at)

    w, x, y = PANEL.to(torch.randn(64, 8)), torch.randn(3, 8), torch.empty(3, 64)
    address = ctypes.cast(parallel, ctypes.c_void_p).value
    panel._start(address, 1, 2, 1, 2, 3, 8, x.data_ptr(), w.data_ptr(), y.data_ptr(), 0, 0, 64, 1, 8 * 128, 0)
    assert {x.data_ptr(), w.data_ptr(), y.data_ptr()} <= set(seen) and -1 not in seen


def test_engines_in_several_threads_answer_as_one_alone():
    model, found = afl.random_model("LlamaForCausalLM", SIZES), []
    want = [c.token_ids for c in model.generate(PROMPTS, max_tokens=6)]
    threads = [
        threading.Thread(target=lambda: found.append([c.token_ids for c in model.generate(PROMPTS, max_tokens=6)]))
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [want] * 4


def test_a_forked_process_answers_instead_of_waiting_for_threads_that_it_does_not_have():
    model = afl.random_model("LlamaForCausalLM", SIZES)
    want = [c.token_ids for c in model.generate(PROMPTS, max_tokens=6)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            same = [c.token_ids for c in model.generate(PROMPTS, max_tokens=6)] == want
            try:
                model.generate(PROMPTS, max_tokens=1, options={"threads": 2})
            except afl.errors.ConfigError as e:
                same = same and "forked" in str(e)
            os.write(writer, b"same" if same and forked() else b"different")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as f:
        assert f.read() == "same", "empty: it was ended by its timer"
    assert os.waitpid(child, 0)[1] == 0 and not forked()


OLD = """
import torch
from afl.ops.kernels import panel
from afl.ops.kernels.loops import processor_has
from afl.ops.panels import PANEL
assert not processor_has("fma") and not processor_has("f16c")
halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
got, want = panel.multiply(torch.ones(1, 1), PANEL.to(halves[:, None]))[0], halves.float()
assert bool(((got == want) | (got.isnan() & want.isnan())).all())
x, w = torch.randn(11, 40), torch.randn(70, 40).half()
assert torch.allclose(panel.multiply(x, PANEL.to(w)).double(), x.double() @ w.double().T, atol=1e-5)
print("right")
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names processors of the x86 family")
def test_a_processor_without_fused_sums_and_half_conversions_computes_the_same_values(tmp_path):
    old = {"NUMBA_CPU_NAME": "nocona", "NUMBA_CPU_FEATURES": "+sse3,+sse2,+sse", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, env={**os.environ, **old})
    assert done.stdout == "right\n", done.stderr[-500:]


def test_without_an_openmp_runtime_the_caller_does_all_the_work(monkeypatch):
    w, x = PANEL.to(torch.randn(1500, 700)), torch.randn(5, 700)
    want = panel.multiply(x, w)
    monkeypatch.setattr(panel, "gomp", lambda: 0)
    assert torch.equal(panel.multiply(x, w), want)
