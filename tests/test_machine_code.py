"""Compiled loops in an installation where no folder for machine code can be written."""

import numba
import pytest
from numba.core import config

from afl.machine_code import kept


def twice(x):
    return 2 * x


@pytest.fixture
def nowhere(monkeypatch):
    """numba with one place for machine code only, a folder that nobody named."""
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setattr(config, "CACHE_DIR", "")
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(twice)


def test_loops_compile_where_nothing_can_be_kept(nowhere):
    assert kept(numba.njit, nogil=True)(twice)(21) == 42
    assert kept(numba.cfunc, numba.types.int64(numba.types.int64))(twice).ctypes(21) == 42


def test_what_can_be_kept_is(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    assert kept(numba.njit)(twice)(4) == 8
    assert list(tmp_path.rglob("*.nbi"))


def test_other_failures_are_not_hidden():
    def broken(**options):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        kept(broken)(twice)
