"""Mutants of the NPU kernels, made from their syntax trees, and whether the tests of this folder catch them.

    PYTHONPATH=tests:tests/ops python tests/ops/mutants_kernels.py [MODULE ...]

Every function in the files of NPU kernels is changed in one place at a time: a keyword left out, a literal, layout
string, axis or sign changed, two neighbouring operands of a vendor call or two results exchanged, a comparison, branch
or piece of arithmetic turned round.  The changed code takes the place of the old one in the running process, where the
conformance suite runs its kernels, and then the tests written for them; a mutant survives if all of them pass.
"""

import ast
import copy
import functools
import importlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import attrs
import conformance
import pytest
import torch

from afl.chip import F
from afl.ir import kernel as kernels

HERE = Path(__file__).parent
PACKAGE = "afl.ops.kernels"
# file of kernels -> tests beside the conformance suite
FILES = {
    "npu_norm": (), "npu_linear": (), "npu_cache": (),
    "npu_act": ("test_npu_kernels.py",), "npu_rope": ("test_npu_kernels.py",), "npu_torch": ("test_sample.py",),
    "fia": ("test_fia.py", "test_npu_kernels.py"), "atb_paged": ("test_fia.py", "test_npu_kernels.py"),
    "atb_nz": ("test_nz.py", "test_npu_kernels.py"), "nz_linear": ("test_nz.py",),
}
SECONDS = 120
OTHER = {"Norm": "PA_NZ", "TND": "BSND", "half": "interleave", "interleave": "half"}
TURNED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.USub: ast.UAdd,
}

Change = tuple[str, Callable[[], None]]


@attrs.frozen
class Mutant:
    """One changed function: `what` names file, function and change, and quotes the line."""

    module: str
    function: str
    what: str
    tree: ast.FunctionDef


def changes(node: ast.AST) -> list[Change]:
    """Everything that can be changed at one node, each as words and a function that does it in place."""
    out: list[Change] = []
    match node:
        case ast.Constant(value=bool() as v):
            out.append((f"{v} to {not v}", lambda: setattr(node, "value", not v)))
        case ast.Constant(value=int() | float() as v):
            out.append((f"{v} to {v + 1}", lambda: setattr(node, "value", v + 1)))
        case ast.Constant(value=str() as v):
            out.append((f"{v!r} changed", lambda: setattr(node, "value", OTHER.get(v, v + "x"))))
        case ast.Call():
            out += [(f"without {k.arg}=", functools.partial(node.keywords.pop, i)) for i, k in enumerate(node.keywords)
                    if k.arg]
            vendor = isinstance(node.func, ast.Attribute) and ast.unparse(node.func).split(".")[0] in ("npu", "atb")
            out += _exchanges(node.args, "operands") if vendor else []
        case ast.Return(value=ast.Tuple(elts=elts)):
            out += _exchanges(elts, "results")
        case ast.Compare():
            out += [(f"{ast.unparse(node)}: comparison {i} turned", functools.partial(_turn, node.ops, i))
                    for i, o in enumerate(node.ops) if type(o) in TURNED]
        case ast.BoolOp() | ast.BinOp() | ast.UnaryOp():
            if type(node.op) in TURNED:
                out.append((f"{ast.unparse(node)}: operator turned",
                            lambda: setattr(node, "op", TURNED[type(node.op)]())))
        case ast.If():
            out.append((f"if {ast.unparse(node.test)}: branch turned",
                        lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))))
        case ast.IfExp():
            out.append((f"{ast.unparse(node)}: choice turned", functools.partial(_swap_choice, node)))
    return out


def _exchanges(items: list[ast.expr], what: str) -> list[Change]:
    def exchange(i: int) -> None:
        items[i], items[i + 1] = items[i + 1], items[i]

    texts = [ast.unparse(x) for x in items]
    return [(f"{what} {texts[i]} and {texts[i + 1]} exchanged", functools.partial(exchange, i))
            for i in range(len(items) - 1) if texts[i] != texts[i + 1]]


def _turn(ops: list[Any], i: int) -> None:
    ops[i] = TURNED[type(ops[i])]()


def _swap_choice(node: ast.IfExp) -> None:
    node.body, node.orelse = node.orelse, node.body


def functions(module: ModuleType) -> Iterator[ast.FunctionDef]:
    """The functions of a file without decorators, annotations and docstrings."""
    for fn in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(fn, ast.FunctionDef):
            fn.decorator_list, fn.returns = [], None
            for a in (*fn.args.args, *fn.args.kwonlyargs, *([fn.args.vararg] if fn.args.vararg else [])):
                a.annotation = None
            first = fn.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(fn.body) > 1:
                del fn.body[0]
            yield fn


def mutants(name: str) -> list[Mutant]:
    """Every mutant of one file."""
    out = []
    module = importlib.import_module(f"{PACKAGE}.{name}")
    lines = Path(str(module.__file__)).read_text().splitlines()
    for fn in functions(module):
        for i, node in enumerate(ast.walk(fn)):
            for j, (what, _) in enumerate(changes(node)):
                made = copy.deepcopy(fn)
                changes(list(ast.walk(made))[i])[j][1]()
                line = lines[getattr(node, "lineno", fn.lineno) - 1].strip()
                text = f"{name}.{fn.name}: {what} | {line}"
                out.append(Mutant(name, fn.name, text, ast.fix_missing_locations(made)))
    return out


class Swapped:
    """While it is open, the function runs the mutant's code."""

    def __init__(self, m: Mutant) -> None:
        table(m.module)                             # before a mutant can hide a kernel from it
        module = importlib.import_module(f"{PACKAGE}.{m.module}")
        found = vars(module)[m.function]
        self.caches = [found] if hasattr(found, "cache_clear") else []
        self.target: FunctionType = getattr(found, "__wrapped__", found)
        space = dict(vars(module))
        exec(compile(ast.Module([m.tree], []), "<mutant>", "exec"), space)
        self.new, self.old = space[m.function].__code__, self.target.__code__

    def _set(self, code: Any) -> None:
        self.target.__code__ = code
        kernels._MEMO.clear()
        for c in self.caches:
            c.cache_clear()

    def __enter__(self) -> None:
        self._set(self.new)

    def __exit__(self, *error: object) -> None:
        self._set(self.old)


@functools.cache
def table(module: str) -> tuple[tuple[conformance.Combination, int], ...]:
    """The kernels of a file on one chip and in each dtype, and how many cases each takes."""
    found: dict[Any, tuple[conformance.Combination, int]] = {}
    for it in conformance.combinations():
        near = it.kernel.fn.__module__ == f"{PACKAGE}.{module}"
        if near and F.NPU in it.chip.features:
            found.setdefault((it.kernel, it.dtype), (it, len(conformance.accepted(it.kernel, it.chip, it.dtype))))
    return tuple(found.values())


def conforming(module: str) -> bool:
    """Whether the kernels of the file pass the conformance suite, and each is still reached by a case."""
    try:
        for it, _ in table(module):
            conformance.conforms(it)
            if not conformance.accepted(it.kernel, it.chip, it.dtype):
                return False
    except Exception:
        return False
    return True


def passing(files: tuple[str, ...]) -> bool:
    """Whether the tests in these files pass, in this process."""
    paths = [str(HERE / f) for f in files]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return pytest.main(["-x", "-p", "no:cacheprovider", *paths]) == 0


def survives(m: Mutant) -> bool:
    """Whether no test notices the mutant; one that does not end is noticed."""
    def late(*args: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with Swapped(m):
            return conforming(m.module) and (not FILES[m.module] or passing(FILES[m.module]))
    except (TimeoutError, SyntaxError):
        return False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    alive, number = [], 0
    for name in names or FILES:
        assert conforming(name) and (not FILES[name] or passing(FILES[name])), f"{name} fails without a mutant"
        made = mutants(name)
        kept = [m.what for m in made if survives(m)]
        print(f"{name}: {len(made)} mutants, {len(kept)} survive", *kept, sep="\n  ", flush=True)
        number, alive = number + len(made), alive + kept
    print(f"{number} mutants, {number - len(alive)} caught: {(number - len(alive)) / number:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
