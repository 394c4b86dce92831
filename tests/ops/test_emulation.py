"""Vendor operators on CPU: values against formulas in float64, rounding points, in-place results, and what they refuse.

Values of attention: test_fia.py.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import REFUSED, W, X, apply, normal, scatter
from torch import Tensor

from afl.errors import VendorRefusal
from afl.ops import emu
from afl.ops.emu.product import multiply
from afl.ops.vendor import npu

HALVES = (torch.bfloat16, torch.float16)
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def nearly(got: Tensor, want: Tensor, scale: Tensor | float | None = None) -> None:
    """Within one rounding of got's dtype, relative to `scale` or the value itself."""
    bound = EPS[got.dtype] * (want.abs() if scale is None else torch.as_tensor(scale)) + 1e-7
    off = (got.double() - want).abs() > bound
    assert not off.any(), f"{int(off.sum())} of {off.numel()}: {got[off][:3]} != {want[off][:3]}"


def sizes(most: int) -> Any:
    return st.integers(1, most)


# ---- values ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(sizes(9), sizes(70), sizes(20), st.sampled_from([torch.float32, *HALVES]))
def test_the_matrix_unit_sums_in_float32_and_each_output_on_its_own(t: int, i: int, o: int, dtype: torch.dtype):
    x, w = normal(t, i, dtype=dtype), normal(o, i, dtype=dtype, seed=1)
    y = multiply(x, w)
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    assert y.dtype == torch.float32 and ((y - exact).abs() <= 1e-6 * size).all()
    rows = torch.cat([multiply(x[j : j + 1], w[c : c + 1]) for j in range(t) for c in range(o)])
    assert torch.equal(rows.view(t, o), y)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", (False, True))
def test_linear_is_rounded_once_behind_the_bias(dtype: torch.dtype, bias: bool):
    x, w, b = normal(5, 48, dtype=dtype), normal(7, 48, dtype=dtype, seed=1), normal(7, dtype=dtype, seed=2)
    got = npu.npu_linear(x, w, b if bias else None)
    want = x.double() @ w.double().T + (b.double() if bias else 0)
    assert got.dtype == dtype
    nearly(got, want)


@pytest.mark.parametrize("dtype", HALVES)
def test_rms_norm_gives_the_result_and_the_float32_factor(dtype: torch.dtype):
    x, gamma = normal(5, 3, 48, dtype=dtype) * 3, normal(48, dtype=dtype, seed=1)
    y, rstd = npu.npu_rms_norm(x, gamma, 1e-5)
    want = 1 / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert rstd.dtype == torch.float32 and rstd.shape == (5, 3, 1)
    nearly(rstd, want)
    nearly(y, x.double() * want * gamma.double())


@pytest.mark.parametrize("dtype", HALVES)
def test_add_rms_norm_norms_the_rounded_sum(dtype: torch.dtype):
    x, r, gamma = normal(5, 48, dtype=dtype), normal(5, 48, dtype=dtype, seed=1) / 37, normal(48, dtype=dtype, seed=2)
    y, rstd, total = npu.npu_add_rms_norm(x, r, gamma, 1e-5)
    assert torch.equal(total, x + r) and rstd.shape == (5, 1)
    exact = x.double() + r.double()
    assert not torch.equal(total.double(), exact), "a case in which the sum is exact tells nothing"
    s = total.double()
    nearly(y, s / (s.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double())


@pytest.mark.parametrize("mode", ("half", "interleave"))
def test_rotation_equals_the_worked_example(mode: str):
    """x = [1, 2, 3, 4] with angles [1, .1]."""
    a = torch.tensor([1.0, 0.1])
    wide = torch.cat([a, a]) if mode == "half" else a.repeat_interleave(2)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    got = npu.npu_rotary_mul(x, wide.cos().view(1, 1, 1, 4), wide.sin().view(1, 1, 1, 4), mode)
    want = {"half": [-1.9841, 1.5907, 2.4624, 4.1797], "interleave": [-1.1426, 1.9221, 2.5857, 4.2795]}[mode]
    assert torch.allclose(got.flatten(), torch.tensor(want), atol=1e-4)


@pytest.mark.parametrize("mode", ("half", "interleave"))
def test_rotation_takes_angles_by_token_for_all_heads_and_rounds_once(mode: str):
    x, a = normal(1, 5, 3, 8), normal(5, 4, dtype=torch.float32)
    wide = (torch.cat([a, a], -1) if mode == "half" else a.repeat_interleave(2, -1))[None, :, None]
    c, s = wide.cos().bfloat16(), wide.sin().bfloat16()
    got = npu.npu_rotary_mul(x, c, s, mode)
    z = x.double()
    for t in range(5):
        for h in range(3):
            for j in range(4):
                u, w = (j, j + 4) if mode == "half" else (2 * j, 2 * j + 1)
                cos, sin = c[0, t, 0, u].double(), s[0, t, 0, u].double()
                y = z[0, t, h, u] * cos - z[0, t, h, w] * sin, z[0, t, h, w] * cos + z[0, t, h, u] * sin
                size = (z[0, t, h, u].abs() + z[0, t, h, w].abs()) * 2
                nearly(got[0, t, h, [u, w]], torch.stack(y), size * 0.5)


def test_rotation_of_query_and_key_overwrites_both():
    """The values are those of npu_rotary_mul."""
    query, key, angles = normal(1, 4, 3, 64), normal(1, 4, 2, 64, seed=1), [normal(1, 4, 1, 64, seed=n) for n in (2, 3)]
    want = [npu.npu_rotary_mul(x, *angles) for x in (query, key)]
    out = apply(query=query, key=key, cos=angles[0], sin=angles[1])
    assert [x.data_ptr() for x in out] == [query.data_ptr(), key.data_ptr()]
    assert torch.equal(query, want[0]) and torch.equal(key, want[1])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", (-1, 0))
def test_swiglu_gates_with_the_first_half(dtype: torch.dtype, dim: int):
    x = normal(4, 10, dtype=dtype) * 4
    got = npu.npu_swiglu(x, dim)
    gate, up = x.double().chunk(2, dim)
    nearly(got, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_scatter_writes_both_caches_in_place_and_skips_negative_slots(dtype: torch.dtype):
    k_cache, v_cache = normal(3, 4, 2, 8), normal(3, 4, 2, 8, seed=1)
    key, value = normal(3, 2, 8, seed=2), normal(3, 2, 8, seed=3)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    want_k[2, 3], want_k[0, 1] = key[0], key[2]
    want_v[2, 3], want_v[0, 1] = value[0], value[2]
    slots = torch.tensor([11, -1, 1], dtype=dtype)
    assert npu.npu_scatter_pa_kv_cache(key, value, k_cache, v_cache, slots, cache_mode="Norm") is None
    assert torch.equal(k_cache, want_k) and torch.equal(v_cache, want_v)
    npu.npu_scatter_pa_kv_cache(key, value, k_cache, v_cache, torch.full((3,), -1), cache_mode="Norm")
    assert torch.equal(k_cache, want_k)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_device_does_not_take_is_refused(name: str):
    call, match = REFUSED[name]
    with pytest.raises(VendorRefusal, match=match):
        call()


FILES = ("norm", "rope", "linear", "act", "cache", "fia", "atb_paged")


def required(name: str) -> dict[int, str]:
    """The requirements written in a file of the emulation, by their last line."""
    path = Path(emu.__path__[0], f"{name}.py")
    calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
    return {c.lineno: ast.unparse(c.args[1]) for c in calls if isinstance(c.func, ast.Name) and c.func.id == "require"}


def test_every_requirement_of_the_emulation_refuses_something():
    reached = set()
    for call, _ in REFUSED.values():
        try:
            call()
        except VendorRefusal as e:
            t = e.__context__.__traceback__ if e.__context__ else None
            while t is not None:
                reached.add((Path(t.tb_frame.f_code.co_filename).stem, t.tb_lineno))
                t = t.tb_next
    idle = {f"{f}.py:{at} {text}" for f in FILES for at, text in required(f).items() if (f, at) not in reached}
    assert not idle


def test_a_refusal_names_the_operator_and_the_operand_with_its_type():
    with pytest.raises(VendorRefusal) as e:
        npu.npu_linear(X, W.half())
    assert "npu::npu_linear" in str(e.value) and "weight f16[6,16]" in str(e.value)


def test_two_caches_may_be_parts_of_one_memory():
    both = normal(2, 3, 4, 2, 8)
    before = both.clone()
    scatter(key_cache=both[0], value_cache=both[1])
    assert (both != before).flatten(2).any(-1).any(-1).tolist() == [True, True]
