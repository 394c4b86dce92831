"""Each seeded bug makes some test of the scheduler fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS

ROOT = Path(__file__).parents[2]
TESTS = ("test_cache", "test_life", "test_step", "test_properties", "test_machine", "test_policies")
LIKELY = {"pool": "cache", "hits": "cache", "hashing": "cache", "naming": "cache", "rows": "life", "results": "life",
          "arrivals": "life", "admit": "properties", "grants": "properties", "loops": "step", "step": "life"}


def test_every_seeded_bug_fits_the_source():
    assert len(MUTANTS) >= 40
    for file, good, bad in MUTANTS:
        text = (ROOT / "afl/sched" / file).read_text()
        assert text.count(good) == 1 and good != bad, (file, good)
        compile(text.replace(good, bad), file, "exec")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package, to be broken."""
    root = tmp_path_factory.mktemp("mutant")
    shutil.copytree(ROOT / "afl", root / "afl", ignore=shutil.ignore_patterns("__pycache__"))
    code, environment = "import afl; print(afl.__file__)", os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout.startswith(str(root)), "the copy is not what is tested"
    return root


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_seeded_bug_is_caught(tree, number):
    file, good, bad = MUTANTS[number]
    path = tree / "afl/sched" / file
    text = path.read_text()
    path.write_text(text.replace(good, bad))
    try:
        first = f"test_{LIKELY.get(Path(file).stem, 'policies')}"           # where it will be caught soonest
        order = sorted(TESTS, key=lambda name: name != first)
        tests = [str(ROOT / f"tests/sched/{name}.py") for name in order]
        # uncompiled loops: a broken copy would have to be compiled anew
        environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT / 'tests/sched'}", "NUMBA_DISABLE_JIT": "1"}
        python = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "first_example"]
        command = [*python, *tests]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
        caught = done.returncode == 1 and "FAILED" in done.stdout          # an error at import would not count
        assert caught, f"{file}: {bad!r} was not caught\n{done.stdout[-500:]}"
    finally:
        path.write_text(text)
