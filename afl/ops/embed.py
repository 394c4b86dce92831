"""From token ids to hidden states, and from hidden states to the rows that are sampled."""

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from afl.ir.op import FLOAT, INT32, Index, T, op
from afl.ops.basic import cast


@op
def embed(token: T[Tensor, "t", INT32, Index("v")], w: T[Tensor, "v d", FLOAT]) -> T[Tensor, "t d", "w"]:
    """Rows of the embedding matrix: w[token]."""
    return w[token.long()]


@singledispatch
def lookup(w: Any, token: Any, dtype: torch.dtype) -> Any:
    """Rows of an embedding matrix in any form, [t, d] in `dtype`."""
    rows = embed(token, w)
    return rows if rows.dtype == dtype else cast(rows, dtype=dtype)


@op
def last_rows(x: T[Tensor, "t d", FLOAT], q_start: T[Tensor, "r+1", INT32, Index("t+1")]) -> T[Tensor, "r d", "x"]:
    """The last token of each row: x[q_start[i+1] - 1].  A row without tokens (padding) yields zeros."""
    end, start = q_start[1:].long(), q_start[:-1].long()
    out = x.new_zeros(len(end), x.shape[-1])
    real = end > start
    out[real] = x[end[real] - 1]
    return out


@embed.cases
def _(rng: Any) -> Any:
    for t, v, d in ((1, 7, 5), (11, 13, 6)):
        yield rng.ints(t, high=v), rng.normal(v, d), {}


@last_rows.cases
def _(rng: Any) -> Any:
    yield rng.normal(7, 5), torch.tensor([0, 3, 4, 7], dtype=torch.int32), {}
    yield rng.normal(3, 5), torch.tensor([0, 1, 2, 3], dtype=torch.int32), {}
    yield rng.normal(8, 5), torch.tensor([0, 3, 6, 6, 6], dtype=torch.int32), {}
    yield rng.normal(4, 5), torch.tensor([0, 0, 4], dtype=torch.int32), {}
