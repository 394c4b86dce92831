"""Layouts keep values: for every one that is registered, and every shape and dtype that it takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afl import plugins
from afl.errors import ConfigError
from afl.layout import copy, layout, plain, registered
from afl.types import type_of

plugins.load_ops()


@pytest.mark.parametrize("name", registered())
@given(st.integers(1, 70), st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
       st.data())
def test_back_undoes_to_and_rows_may_arrive_in_any_pieces(
    name: str, o: int, i: int, dtype: torch.dtype, data: st.DataObject
):
    made = layout(name)
    x = torch.randn(o, i).to(dtype)
    whole, parts, at = made.to(x), made.empty((o, i), dtype), 0
    while at < o:
        n = data.draw(st.integers(1, o - at))
        made.put(parts, x[at : at + n], at)
        at += n
    for stored in (whole, parts, copy(whole)):
        assert stored.shape == x.shape and stored.dtype == dtype and type_of(stored).fmt == made.fmt
        assert torch.equal(made.back(stored), x) and torch.equal(plain(stored), x)
        assert stored.untyped_storage().nbytes() == made.nbytes((o, i), dtype)


def test_an_unknown_layout_names_the_nearest():
    with pytest.raises(ConfigError, match="panel"):
        layout("pannel")
