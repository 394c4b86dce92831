"""Loops that numba compiles: their machine code is kept on disk between processes, where a folder can be written."""

from collections.abc import Callable
from typing import Any


def kept(make: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles with `make` (numba.njit, numba.cfunc), its arguments and options.

    numba refuses to keep code when neither the folder of the source nor the user's cache can be written, as in an
    installation that belongs to somebody else with no home folder.  Then every process compiles anew.
    """

    def compile(function: Callable[..., Any]) -> Any:
        try:
            return make(*arguments, cache=True, **options)(function)
        except RuntimeError as e:
            if "no locator available" not in str(e):
                raise
            return make(*arguments, **options)(function)

    return compile
