"""Vendor operators on CPU tensors: `@emulate` collects implementations, `register` gives them to torch, once.

An implementation has the parameters of the vendor's schema (names, order, defaults), computes in float32 with the
vendor's rounding points, and refuses what the vendor refuses:

    @emulate("npu::npu_swiglu")
    def _(input, dim=-1):
        require(input.shape[dim] % 2 == 0, "the split dimension must be even", input)
        ...

Where torch_npu can be imported its own schemas are used.  Otherwise the schemas of `schemas.py` are defined here, and
from then on torch_npu cannot be imported: a second definition would abort the process.
"""

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from afl.device import vendor_package
from afl.errors import AflError, VendorRefusal, unknown, violations
from afl.ops.emu.schemas import SCHEMAS
from afl.types import HostInts, type_of

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}      # "npu::npu_swiglu", "npu::name.overload" -> function
_LIBRARIES: list[torch.library.Library] = []             # a registration lasts as long as its library object


class _Refused(Exception):
    """A refusal on its way to the operator that can name itself and its arguments."""


def require(holds: bool, message: str, *operands: Any) -> None:
    """Refuse the call unless `holds`.  `message` says what is expected; `operands` are shown with their names."""
    if not holds:
        raise _Refused(message, operands)


def emulate(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as the operator `name`, such as "npu::npu_rms_norm" or "npu::name.out".

    Raises AflError for a name without schema, a second declaration, or one that comes after `register`.
    """

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        if name not in SCHEMAS:
            raise AflError(unknown("vendor operator", name, SCHEMAS))
        if name in IMPLEMENTATIONS:
            raise AflError(f"{name} is emulated twice: {IMPLEMENTATIONS[name].__module__} and {fn.__module__}")
        if _LIBRARIES:
            raise AflError(f"{name} is declared after the vendor operators were registered; import it earlier")
        names = list(inspect.signature(fn).parameters)

        @functools.wraps(fn)
        def call(*args: Any, **params: Any) -> Any:
            try:
                return fn(*args, **params)
            except _Refused as e:
                message, operands = e.args
                given = dict(zip(names, args, strict=False)) | params
                got = "; got " + ", ".join(_shown(x, given) for x in operands) if operands else ""
                raise VendorRefusal(f"{name}: {message}{got}") from None

        IMPLEMENTATIONS[name] = call
        return call

    return wrap


def _shown(x: Any, given: dict[str, Any]) -> str:
    """One argument with its name, if it is one, and its type or value."""
    name = next((n for n, v in given.items() if v is x and not isinstance(x, bool | type(None))), "")
    text = str(type_of(x)) if isinstance(x, torch.Tensor | HostInts) else repr(x)
    return f"{name} {text if len(text) < 80 else text[:77] + '...'}".lstrip()


def disagreement(schema: str, fn: Callable[..., Any]) -> str | None:
    """How the parameters of `fn` differ from those of the schema, or None.

    torch leaves out arguments that equal their default, so defaults must agree too.
    """
    want = [(a.name, a.kwarg_only, a.default_value if a.has_default_value() else inspect.Parameter.empty)
            for a in torch._C.parse_schema(schema).arguments]
    got = [(p.name, p.kind is p.KEYWORD_ONLY, p.default) for p in inspect.signature(fn).parameters.values()]
    for w, g in zip(want, got, strict=False):
        if w != g:
            return f"parameter {g[0]!r} is {g[1:]}, the schema has {w[0]!r} {w[1:]} (keyword-only, default)"
    return None if len(want) == len(got) else f"{len(got)} parameters, the schema has {len(want)}"


def outdated(name: str) -> str | None:
    """How the schema that torch_npu has registered under `name` differs from the one of the table, or None."""
    name, _, overload = name.partition(".")
    real = next((s for s in torch._C._jit_get_schemas_for_operator(name) if s.overload_name == overload), None)
    if real == torch._C.parse_schema(SCHEMAS[f"{name}.{overload}".rstrip(".")]):
        return None
    return f"the installed torch_npu has another schema: {real or 'none'}; install the version of the extra afl[npu]"


def load() -> None:
    """Import every module of this package, so that all emulations are declared."""
    package = importlib.import_module(__package__ or "afl.ops.emu")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


@functools.cache
def register() -> None:
    """Give every emulated operator to torch for CPU tensors; defines the schemas if torch_npu is absent.

    Called at the first use of a chip that calls vendor operators, never at import.
    """
    load()
    absent = vendor_package() is None
    wrong = {n: disagreement(SCHEMAS[n], fn) or (None if absent else outdated(n)) for n, fn in IMPLEMENTATIONS.items()}
    if any(wrong.values()):
        raise AflError(violations("emulated operators", [f"{n}: {why}" for n, why in wrong.items() if why]))
    if absent:
        sys.meta_path.insert(0, _NoVendorPackage())
    for space in sorted({n.split("::")[0] for n in SCHEMAS}):
        library = torch.library.Library(space, "FRAGMENT")
        _LIBRARIES.append(library)
        for name, schema in SCHEMAS.items():
            if name.startswith(f"{space}::") and absent:
                library.define(schema.removeprefix(f"{space}::"))
        for name, fn in IMPLEMENTATIONS.items():
            if name.startswith(f"{space}::"):
                library.impl(name.removeprefix(f"{space}::"), fn, "CPU")


class _NoVendorPackage(MetaPathFinder, Loader):
    """Finds torch_npu wherever it is, in order to refuse its import with a reason."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch_npu" or PathFinder.find_spec(fullname, path) is None:
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(
            "torch_npu cannot be imported now: this process emulates an NPU chip and has defined the vendor's "
            "operators itself, since torch_npu could not be imported when that chip was first used. "
            "A second definition would abort the process. Make torch_npu and its libraries importable and start again.",
            name=module.__name__,
        )
