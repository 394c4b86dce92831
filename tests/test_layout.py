"""Layouts keep values: for every one that is registered, and every shape and dtype that it takes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afl import chip as chips
from afl import plugins
from afl.errors import ConfigError
from afl.layout import copy, layout, plain, registered, zeros
from afl.ops.nz import memory
from afl.types import type_of

plugins.load_ops()


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32)
ONLY = {"panel4": (torch.uint8,), "panel-quad4": (torch.uint8,), "panel-quad": (torch.int8,)}     # uint8: 0 to 15
MATRIX = st.tuples(st.integers(1, 70), st.integers(1, 40))
SHAPES = {                              # beyond matrices
    "nd": st.lists(st.integers(1, 9), max_size=4).map(tuple), "bsnd": st.tuples(*[st.integers(1, 9)] * 4),
    "nz": st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 5), st.integers(1, 40))
    | st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)) | st.tuples(st.integers(1, 40)),
}


@pytest.mark.parametrize("name", registered())
@given(st.data())
def test_back_undoes_to_and_rows_may_arrive_in_any_pieces(name: str, data: st.DataObject):
    made, dtype = layout(name), data.draw(st.sampled_from(ONLY.get(name, DTYPES)))
    shape = data.draw(MATRIX | SHAPES[name] if name in SHAPES else MATRIX)
    x = torch.arange(1, math.prod(shape) + 1).remainder(16 if dtype == torch.uint8 else 127).reshape(shape).to(dtype)
    whole, parts, at = made.to(x), made.empty(shape, dtype), 0
    while at < (len(x) if shape else 0):
        n = data.draw(st.integers(1, len(x) - at))
        made.put(parts, x[at : at + n], at)
        at += n
    empty = zeros(shape, dtype, made.fmt_of(shape))
    assert torch.equal(plain(empty), torch.zeros(shape, dtype=dtype))
    for stored in (whole, *([parts] if shape else []), copy(whole), empty):
        assert stored.shape == x.shape and stored.dtype == dtype and type_of(stored).fmt == made.fmt_of(shape)
        assert stored.untyped_storage().nbytes() == made.nbytes(shape, dtype)
        if stored is not empty:
            assert torch.equal(made.back(stored), x) and torch.equal(plain(stored), x)


# ---- NZ: the bytes, by the formula of the vendor's documentation ---------------------------------------------------


def offset(r: int, c: int, rows: int, columns: int = 16) -> int:
    """Place of element (r, c) of a matrix with that many rows."""
    return ((c // columns * -(-rows // 16) + r // 16) * 16 + r % 16) * columns + c % columns


@given(st.integers(2, 70), st.integers(2, 70), st.sampled_from(DTYPES))
def test_nz_holds_each_element_where_the_vendor_looks_for_it(rows: int, cols: int, dtype: torch.dtype):
    n = 32 if dtype.itemsize == 1 else 16
    x = torch.arange(1, rows * cols + 1).remainder(127).add(1).reshape(rows, cols).to(dtype)
    stored = layout("nz").to(x)
    flat = torch.empty(0, dtype=dtype).set_(stored.untyped_storage())
    at = torch.tensor([[offset(r, c, rows, n) for c in range(cols)] for r in range(rows)])
    assert torch.equal(flat[at], x)
    assert flat.count_nonzero() == x.numel(), "padding is zero"


def test_nz_examples():
    assert (offset(17, 19, 18), offset(3, 5, 18), offset(0, 16, 18), offset(16, 0, 18)) == (787, 53, 512, 256)
    assert offset(17, 19, 18, 32) == 563


def test_nz_cache_holds_slot_head_and_channel_where_the_vendor_looks_for_them():
    x = torch.randn(3, 128, 2, 64).half()
    lies = memory(layout("nz").to(x))
    assert lies.shape == (3, 8, 128, 16) and lies.is_contiguous()
    assert lies[2, 4, 44, 5] == x[2, 44, 1, 5]          # slot 300, channel 1 * 64 + 5 = 69
    b, s, k, e = torch.meshgrid(*map(torch.arange, x.shape), indexing="ij")
    c = k * 64 + e
    assert torch.equal(lies[b, c // 16, s, c % 16], x)


@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (1, 1), (5, 1, 7), (5, 7, 1), (9,), ()])
def test_one_row_or_one_column_stays_plain_in_nz(shape: tuple[int, ...]):
    made, x = layout("nz"), torch.randn(shape)
    assert type_of(made.to(x)).fmt == made.fmt_of(shape) == "nd" and torch.equal(made.to(x), x)


def test_a_reader_that_does_not_know_nz_sees_other_values():
    x = torch.randn(32, 48).half()
    stored = layout("nz").to(x)
    assert torch.equal(stored.flatten().sort().values, x.flatten().sort().values) and not torch.equal(stored, x)


def test_every_chip_names_layouts_that_exist():
    for chip in chips.registered().values():
        assert [layout(name) for name in chip.layouts.values()]


def test_an_unknown_layout_names_the_nearest():
    with pytest.raises(ConfigError, match="panel"):
        layout("pannel")
