"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import afl


def _modules() -> list[str]:
    return ["afl", *(m.name for m in pkgutil.walk_packages(afl.__path__, "afl."))]


@pytest.mark.parametrize("name", _modules())
def test_examples_of_a_module_hold(name: str):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed
