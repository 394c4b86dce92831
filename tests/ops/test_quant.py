"""Weight schemes: what is stored, what it costs in accuracy, and that products are those of the decoded weight."""

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
from afl.ops.kernels.panel import multiply
from afl.ops.panels import PANEL
from afl.ops.quant import scheme as schemes
from afl.ops.quant.int4 import from_q4_0, from_q4_1
from afl.ops.quant.int8 import from_q8_0

plugins.load_ops()
ERROR = {"int8": 0.5 / 127, "int8-channel": 0.5 / 127, "int4": 0.5 / 7.5, "int4-sym": 1 / 8}    # of a group's largest


def product(x, w):
    parts = {n: getattr(w, n) for n in ("q", "scale", "low") if hasattr(w, n)}
    return multiply(x, parts["q"], parts["scale"], parts.get("low"), w.group)


@pytest.mark.parametrize("name", schemes.registered())
@given(st.integers(1, 70), st.integers(1, 100), st.integers(1, 20), st.integers(0, 9))
def test_a_product_is_bit_for_bit_that_of_the_decoded_weight(name, o, i, t, seed):
    rng = Rng(seed)
    w, x = schemes.store(name, "panel").to(rng.normal(o, i)), rng.normal(t, i)
    got = product(x, w)
    assert torch.equal(got, multiply(x, PANEL.to(schemes.scheme(name).decode(w))))
    assert torch.equal(got[-1:], product(x[-1:], w)), "a row depends on its batch mates"


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
])
def test_blocks_of_a_file_are_taken_over_exactly(kind, name, take):
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(Rng(5).normal(37, 96).numpy() * np.float32(0.1), type_)
    w = schemes.store(name, "panel").empty((37, 96), torch.float32)
    schemes.store(name, "panel").put_taken(w, kind, torch.from_numpy(raw), 0)
    assert torch.equal(schemes.scheme(name).decode(w), torch.from_numpy(gguf.quants.dequantize(raw, type_)))


def test_sizes_are_those_that_are_stored():
    shape = (64, 64)
    sizes = {"int8": 64 * 64 + 64 * 2 * 2, "int4": 64 * 32 + 2 * 64 * 2 * 2, "int8-channel": 64 * 64 + 64 * 4}
    for name, want in sizes.items():
        store = schemes.store(name, "panel")
        made = store.to(torch.randn(shape))
        assert store.nbytes(shape, torch.float32) == sum(map(stored_bytes, tree.leaves(made))) == want
        assert sum(map(stored_bytes, tree.leaves(store.types(shape, torch.float32)))) == want


def test_what_a_scale_cannot_hold_is_refused():
    with pytest.raises(CheckpointError, match="too large"):
        schemes.store("int4", "panel").to(torch.full((2, 32), 1e6) * torch.randn(2, 32))
