"""Shared fixtures: `rng` makes tensors, `golden` compares text with a file that `--update-golden` rewrites."""

from pathlib import Path

import pytest
from hypothesis import settings
from rng import Rng

settings.register_profile("afl", deadline=None)     # the first example may compile a loop
settings.load_profile("afl")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt; review the diff")


def pytest_collection_modifyitems(config, items):
    if "soak" not in (config.option.markexpr or ""):
        long = [i for i in items if i.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=long)
        items[:] = [i for i in items if i not in long]


@pytest.fixture
def rng() -> Rng:
    return Rng()


@pytest.fixture
def golden(request):
    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run pytest --update-golden and review it"
        assert text == path.read_text(), f"{path.name} differs; if that is meant, pytest --update-golden and review it"

    return compare
