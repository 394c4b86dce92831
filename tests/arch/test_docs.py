"""What the documents say holds: their code runs, their links lead somewhere, their tables list what exists."""

import re
import subprocess
import sys
import tomllib

import pytest
from tree_imports import ALLOWED, ROOT

from afl import chip, plugins
from afl.models import spec

PAGES = [*(ROOT / n for n in ("README.md", "CHANGELOG.md", "afl/glossary.md")), *sorted((ROOT / "docs").glob("*.md"))]

CHECK = '''
from conformance import combinations, conforms
from afl import chip, sched
from afl.ir.kernel import explain
from afl.types import type_of
rows = combinations(softcap)
for it in rows:
    conforms(it)
print(sorted({(it.kernel.name, it.chip.name) for it in rows}))
print(explain(softcap, (type_of(torch.ones(2, 3)),), (("cap", 1.0),), chip.get("a7")).chosen)
from afl.models import spec
print("CappedForCausalLM" in spec.registered(), sched.policies.get("longest").order)
'''


def test_the_examples_of_add_an_op_run_and_conform():
    text = (ROOT / "docs/add-an-op.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    paths = f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT / 'tests/ops')!r}]\n"
    done = subprocess.run([sys.executable, "-W", "error", "-c", paths + code + CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table, chosen, rest = done.stdout.splitlines()
    want = [("a7_tanh", "a7"), ("reference", "a7"), ("reference", "cpu"), ("torch", "a7"), ("torch", "cpu")]
    assert table == str(want)
    assert chosen == "<kernel softcap/a7_tanh>" and rest == "True longest"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    links = [page.parent / x for x in re.findall(r"\]\(([^)#:]+)\)", text)]
    invented = ("softcap", "a7", "capped", "longest")
    named = [
        ROOT / x for x in re.findall(r"`((?:afl|cli|tests|docs|bench)/[\w./-]+)`", text)
        if "<" not in x and not any(f"/{n}.py" in x for n in invented)
    ]
    lost = [str(p) for p in [*links, *named] if not p.exists()]
    assert not lost


def test_the_readme_lists_every_chip_and_model():
    text = (ROOT / "README.md").read_text()
    plugins.load_models()
    for name in [*chip.names(), *(n for n, m in spec.registered().items() if m.step.__module__.startswith("afl."))]:
        assert f"`{name}`" in text, f"{name} is missing in README.md"


def test_every_dependency_is_explained():
    text = (ROOT / "docs/dependencies.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = [re.split(r"[\[<>=~ ]", d)[0] for d in wanted]
    assert not [n for n in names if n not in text]
    assert "transformers" not in " ".join(project["dependencies"])


def test_the_architecture_page_lists_every_package():
    text = (ROOT / "docs/architecture.md").read_text()
    assert not [row for row in ALLOWED if row not in ("", "device") and f"`{row}`" not in text]
