"""Gated activations."""

from typing import Any

import torch
from torch import Tensor

from afl.ir.op import FLOAT, T, op


@op
def swiglu(x: T[Tensor, "*b 2*f", FLOAT]) -> T[Tensor, "*b f", "x"]:
    """silu(gate) * up, where x holds gate in its first half and up in its second.

    Source: Shazeer 2020 (arXiv:2002.05202), eq. 6.  Computed in float32.
    """
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@swiglu.cases
def _(rng: Any) -> Any:
    for shape in ((1, 8), (5, 26), (3, 2, 14)):
        yield rng.normal(*shape) * 4, {}
