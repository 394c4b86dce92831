"""Weight schemes: what is stored, what it costs in accuracy, and that products are those of the decoded weight."""

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rng import Rng

from afl import plugins, tree
from afl.errors import CheckpointError
from afl.layout import stored_bytes
from afl.ops.kernels import dot
from afl.ops.kernels.panel import multiply
from afl.ops.panels import PANEL
from afl.ops.quant import scheme as schemes
from afl.ops.quant.int4 import from_q4_0, from_q4_1
from afl.ops.quant.int8 import from_q8_0

plugins.load_ops()
ERROR = {"int8": 0.5 / 127, "int8-channel": 0.5 / 127, "int8-dynamic": 0.5 / 127, "int4": 0.5 / 7.5, "int4-sym": 1 / 8,
         "int4-dynamic": 0.5 / 7.5}                                                         # of a group's largest
DYNAMIC = ("int8-dynamic", "int4-dynamic")
SIZES = st.integers(1, 70), st.integers(1, 100), st.integers(1, 20), st.integers(0, 9)


def product(x, w):
    parts = {n: getattr(w, n) for n in ("q", "scale", "low") if hasattr(w, n)}
    if w.dynamic:
        return dot.multiply(x, **parts)
    return multiply(x, parts["q"], parts["scale"], parts.get("low"), w.group)


@pytest.mark.parametrize("name", sorted(schemes.registered().keys() - set(DYNAMIC)))
@given(*SIZES)
def test_a_product_is_bit_for_bit_that_of_the_decoded_weight(name, o, i, t, seed):
    rng = Rng(seed)
    w, x = schemes.store(name, "panel").to(rng.normal(o, i)), rng.normal(t, i)
    got = product(x, w)
    assert torch.equal(got, multiply(x, PANEL.to(schemes.scheme(name).decode(w))))
    assert torch.equal(got[-1:], product(x[-1:], w)), "a row depends on its batch mates"


def by_hand(x, w):
    """float64 [t, o] and the sum of magnitudes: activations by one division and one rounding each, group by group."""
    decoded = schemes.scheme("int8" if w.q.dtype == torch.int8 else "int4").decode(w).double().numpy()
    x, numbers = x.numpy(), np.zeros(x.shape)
    for first in range(0, x.shape[1], 32):
        part = x[:, first : first + 32]
        most = np.abs(part).max(1, keepdims=True)
        inverse = np.divide(np.float32(127), most, where=most > 0, out=np.zeros_like(most))
        numbers[:, first : first + 32] = np.rint(part * inverse) * (most / np.float32(127)).astype(np.float64)
    return numbers @ decoded.T, np.abs(numbers) @ np.abs(decoded).T


@pytest.mark.parametrize("name", DYNAMIC)
@given(*SIZES)
def test_a_dynamic_product_is_that_of_the_rounded_activations(name, o, i, t, seed):
    rng = Rng(seed)
    w, x = schemes.store(name, "panel").to(rng.normal(o, i)), rng.normal(t, i)
    x[0, ::3] *= 100
    got, (want, room) = product(x, w), by_hand(x, w)
    # numbers of 4 bits and their lowest value cancel: both summands count
    assert (np.abs(got.numpy() - want) <= 1e-5 * (room + 1) * (1 if name == "int8-dynamic" else 4)).all()
    for a, b in ((0, 1), (t // 2, t), (t - 1, t)):
        assert torch.equal(got[a:b], product(x[a:b], w)), "a row depends on its batch mates"


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_batch_mate_with_outliers_zeros_or_no_numbers_changes_no_other_row(name):
    w, x = schemes.store(name, "panel").to(Rng(6).normal(70, 75)), Rng(7).normal(6, 75)
    want = product(x, w)
    for row, value in ((1, float("nan")), (3, float("inf")), (4, 0.0), (5, 1e30)):
        x[row, :] = value
    x[4, 40] = 1e-42                                    # its inverse is no float32
    got = product(x, w)
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and got[[1, 3]].isnan().all()
    assert got[[0, 2, 4, 5]].isfinite().all() and not got[4].any()


@pytest.mark.parametrize("name", DYNAMIC)
def test_threads_do_not_change_a_dynamic_product(name):
    w, x = schemes.store(name, "panel").to(Rng(8).normal(1003, 577)), Rng(9).normal(7, 577)
    before, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 1):
            torch.set_num_threads(n)
            found.append(product(x, w))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


OTHER = """
import sys, torch
from afl import plugins
from afl.ops.kernels import dot
from afl.ops.kernels.loops import processor_has
from afl.ops.quant import scheme as schemes
plugins.load_ops()
assert not processor_has("avx512vnni")
for name, (matrix, x, want) in torch.load(sys.argv[1]).items():
    w = schemes.store(name, "panel").to(matrix)
    got = dot.multiply(x, w.q, w.scale, getattr(w, "low", None))
    assert torch.equal(got, want) if processor_has("fma") else torch.allclose(got, want, atol=1e-4), name
print("right")
"""
PROCESSORS = {"nocona": "+sse3,+sse2,+sse",
              "haswell": "+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+sse4.2,+sse4.1,+ssse3,+popcnt"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names processors of the x86 family")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_without_the_instruction_computes_the_same(processor, tmp_path):
    """Where it has fused sums, the same bits."""
    rows = {}
    for name in DYNAMIC:
        matrix, x = Rng(10).normal(70, 100), Rng(11).normal(7, 100)
        rows[name] = matrix, x, product(x, schemes.store(name, "panel").to(matrix))
    torch.save(rows, tmp_path / "rows.pt")
    other = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": PROCESSORS[processor],
             "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", OTHER, str(tmp_path / "rows.pt")], capture_output=True, text=True,
                          env={**os.environ, **other})
    assert done.stdout == "right\n", done.stderr[-800:]


@pytest.mark.parametrize("name", schemes.registered())
def test_values_are_as_near_as_the_numbers_allow(name):
    x = Rng(1).normal(50, 64) * torch.logspace(-1, 2, 50)[:, None]
    got = schemes.scheme(name).decode(schemes.store(name, "panel").to(x))
    most = x.abs().amax(1, keepdim=True)
    assert ((got - x).abs() <= most * ERROR[name] * 1.01 + 1e-6).all()


@pytest.mark.parametrize("name", schemes.registered())
def test_rows_may_arrive_in_any_pieces_and_zeros_stay_zeros(name):
    x = Rng(2).normal(75, 40)
    x[3], x[64] = 0, 0
    store = schemes.store(name, "panel")
    whole, pieces = store.to(x), store.empty((75, 40), torch.float32)
    for a, b in ((0, 5), (5, 33), (33, 34), (34, 75)):
        store.put(pieces, x[a:b], a)
    decode = schemes.scheme(name).decode
    assert torch.equal(decode(whole), decode(pieces)) and not decode(whole)[3].any() and not decode(whole)[64].any()


@pytest.mark.parametrize("i, groups", [(4304, 135), (2144, 67), (32, 1), (1, 1)])
def test_c12_the_last_group_may_be_short(i, groups):
    w = schemes.store("int8", "panel").to(Rng(3).normal(3, i))
    assert w.scale.shape == (3, groups)
    x = Rng(4).normal(2, i)
    want = x.double() @ schemes.scheme("int8").decode(w).double().T
    assert torch.allclose(product(x, w).double(), want, atol=1e-3)


@pytest.mark.parametrize("kind, name, take", [
    ("Q8_0", "int8", from_q8_0), ("Q4_1", "int4", from_q4_1),
    ("Q4_0", "int4", from_q4_0), ("Q4_0", "int4-sym", from_q4_0),
    ("Q8_0", "int8-dynamic", from_q8_0), ("Q4_1", "int4-dynamic", from_q4_1), ("Q4_0", "int4-dynamic", from_q4_0),
])
def test_blocks_of_a_file_are_taken_over_exactly(kind, name, take):
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(Rng(5).normal(37, 96).numpy() * np.float32(0.1), type_)
    w = schemes.store(name, "panel").empty((37, 96), torch.float32)
    schemes.store(name, "panel").put_taken(w, kind, torch.from_numpy(raw), 0)
    assert torch.equal(schemes.scheme(name).decode(w), torch.from_numpy(gguf.quants.dequantize(raw, type_)))


def test_sizes_are_those_that_are_stored():
    shape = (64, 64)
    sizes = {"int8": 64 * 64 + 64 * 2 * 2, "int4": 64 * 32 + 2 * 64 * 2 * 2, "int8-channel": 64 * 64 + 64 * 4,
             "int8-dynamic": 64 * 64 + 64 * 2 * 2, "int4-dynamic": 64 * 32 + 2 * 64 * 2 * 2}
    for name, want in sizes.items():
        store = schemes.store(name, "panel")
        made = store.to(torch.randn(shape))
        assert store.nbytes(shape, torch.float32) == sum(map(stored_bytes, tree.leaves(made))) == want
        assert sum(map(stored_bytes, tree.leaves(store.types(shape, torch.float32)))) == want


def test_what_a_scale_cannot_hold_is_refused():
    with pytest.raises(CheckpointError, match="too large"):
        schemes.store("int4", "panel").to(torch.full((2, 32), 1e6) * torch.randn(2, 32))
