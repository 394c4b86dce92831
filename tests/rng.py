"""Seeded random tensors: what the `cases` of an op take."""

import numpy as np
import torch
from torch import Tensor


class Rng:
    """One stream of numbers; the same seed gives the same tensors on every machine.

    >>> Rng(3).ints(4, high=2).dtype
    torch.int32
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float32."""
        return torch.from_numpy(self._rng.standard_normal(shape, np.float32))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform float32 in [0, 1)."""
        return torch.from_numpy(self._rng.random(shape, np.float32))

    def ints(self, *shape: int, high: int, low: int = 0) -> Tensor:
        """int32 in [low, high)."""
        return torch.from_numpy(self._rng.integers(low, high, shape, np.int32))

    def permutation(self, n: int) -> Tensor:
        """The numbers 0 ... n-1 in random order, int32."""
        return torch.from_numpy(self._rng.permutation(n).astype(np.int32))
