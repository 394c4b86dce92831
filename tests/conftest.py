"""Shared fixtures: `rng` makes tensors, `golden` compares text with a file that `--update-golden` rewrites."""

from pathlib import Path

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt; review the diff")


def pytest_collection_modifyitems(config, items):
    if "soak" not in (config.option.markexpr or ""):
        long = [i for i in items if i.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=long)
        items[:] = [i for i in items if i not in long]


class Rng:
    """Seeded tensors; shapes are positional."""

    def __init__(self, seed: int = 0) -> None:
        self.np = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.np.standard_normal(shape))).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.np.uniform(low, high, shape))).float()

    def angles(self, *shape: int) -> torch.Tensor:
        return self.uniform(*shape, low=-3.0, high=3.0)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.from_numpy(np.asarray(self.np.integers(low, high, shape))).to(dtype)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.from_numpy(self.np.permutation(n)).to(torch.int32)


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
