"""What every cache kind declares: bytes per block, and how to make an empty cache of one layer."""

from typing import Any, Protocol

import torch

from afl.chip import Chip


class CacheSpec(Protocol):
    """A declaration of one layer's cache.  `kind` names the group of layers that share block tables."""

    @property
    def kind(self) -> str: ...

    @property
    def head_size(self) -> int:
        """Channels of one head, which limit the tokens of a block on some chips."""
        ...

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one block of this layer."""
        ...

    def types(self, chip: Chip, blocks: int, block_tokens: int, dtype: torch.dtype) -> Any:
        """The cache struct of one layer with types for leaves; `blocks` counts the null block."""
        ...
