"""From logits to the next token.  Every op works row by row: a row's result depends on nothing but that row.

`sample` is the only sampling algorithm on every chip: one uniform number per row, inverted through the cumulative
distribution in token-id order in float64.
"""

from typing import Any

import torch
from torch import Tensor

from afl.ir.op import FLOAT32, INT32, Index, T, op

F64 = frozenset({torch.float64})
ANY_ID = "2147483647"          # ids from the host are checked against the vocabulary by `embed`
GREEDY_BELOW = 1e-5            # a temperature below this means argmax
SLACK = 1e-6                   # of the borders of min_p and top_p: what is equal in decimals is equal in float32 too


@op(view_of="logits")
def edit_logits(
    logits: T[Tensor, "r v", FLOAT32],
    row: T[Tensor, "m", INT32, Index("r", none=True)], token: T[Tensor, "m", INT32, Index("v")],
    bias: T[Tensor, "m", FLOAT32], repeat: T[Tensor, "m", FLOAT32], minus: T[Tensor, "m", FLOAT32],
) -> T[Tensor, "r v", "logits"]:
    """Sparse edits, at most one per (row, token): y = l + bias; y = y / repeat if y > 0 else y * repeat; y - minus.

    A bias of -inf bans a token; row -1 edits nothing.  Without edits the result may be `logits` itself.
    """
    out = logits.clone()
    real = row >= 0
    r, t = row[real].long(), token[real].long()
    y = torch.where(bias[real] == -torch.inf, -torch.inf, out[r, t] + bias[real])      # a ban holds for inf as well
    out[r, t] = torch.where(y > 0, y / repeat[real], y * repeat[real]) - minus[real]
    return out


@op
def greedy(logits: T[Tensor, "r v", FLOAT32]) -> T[Tensor, "r", INT32]:
    """The id of the largest logit, the lowest one among equals.  NaN counts as -inf; a row of nothing else gives 0."""
    return torch.where(logits.isnan(), -torch.inf, logits).argmax(-1).to(torch.int32)


@op
def sample(
    logits: T[Tensor, "r v", FLOAT32], temperature: T[Tensor, "r", FLOAT32], top_k: T[Tensor, "r", INT32],
    top_p: T[Tensor, "r", FLOAT32], min_p: T[Tensor, "r", FLOAT32], u: T[Tensor, "r", F64],
) -> T[Tensor, "r", INT32]:
    """token = min{i : cumsum(p)_i > u * sum(p)} over the kept tokens, in id order, in float64.

    p = exp((l - max l) / temperature).  Kept are tokens with p >= min_p * max p; of those the ones whose logit reaches
    the k-th largest (top_k; ties stay; <= 0 or >= v is off); of those all but the least likely ones that together hold
    at most 1 - top_p of what is left (among equals the higher id goes first; one token always stays; >= 1 is off).
    If rounding leaves no such i, the last kept token.  NaN is never chosen.  A temperature below 1e-5 means `greedy`;
    such a row is never divided.  A row without a finite maximum is greedy too.
    """
    v = logits.shape[1]
    x = torch.where(logits.isnan(), -torch.inf, logits)
    best = x.argmax(-1)
    most = x.gather(1, best[:, None]).double()
    plain = ~(temperature >= GREEDY_BELOW) | ~torch.isfinite(most[:, 0])
    t = torch.where(plain, 1.0, temperature.double())[:, None]
    p = torch.where(plain[:, None], 0.0, ((x.double() - most) / t).exp())
    p[p < min_p.double().clamp(max=1)[:, None] * (1 - SLACK)] = 0.0
    for i in torch.nonzero((top_k > 0) & (top_k < v) & ~plain)[:, 0].tolist():
        p[i, x[i] < x[i].topk(int(top_k[i])).values[-1]] = 0.0
    for i in torch.nonzero((top_p < 1) & ~plain)[:, 0].tolist():
        rising = x[i].argsort(descending=True, stable=True).flip(0)
        mass = p[i][rising].cumsum(0)
        drop = mass <= (1 - top_p[i].double()) * (1 + SLACK) * mass[-1]
        drop[-1] = False
        p[i, rising[drop]] = 0.0
    total = p.cumsum(-1)
    goal = u * total[:, -1]
    at = (total > goal[:, None]).int().argmax(-1)                          # the first True, 0 if there is none
    found = total.gather(1, at[:, None])[:, 0] > goal
    last = v - 1 - (p > 0).flip(-1).int().argmax(-1)
    return torch.where(plain, best, torch.where(found, at, last)).to(torch.int32)


@op
def take_tokens(
    token: T[Tensor, "t", INT32, Index(ANY_ID, low="n")], last: T[Tensor, "n", INT32]
) -> T[Tensor, "t", INT32]:
    """token where it is an id; a code -1 - row stands for last[row]."""
    coded = token < 0
    return torch.where(coded, last[torch.where(coded, -1 - token, 0).long()], token)


@op
def put_tokens(
    last: T[Tensor, "n", INT32], row: T[Tensor, "r", INT32, Index("n", none=True)], token: T[Tensor, "r", INT32]
) -> T[Tensor, "n", INT32]:
    """last with token[i] at row[i]; row -1 writes nothing.  Rows are distinct."""
    out = last.clone()
    real = row >= 0
    out[row[real].long()] = token[real]
    return out


def _i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@edit_logits.cases
def _(rng: Any) -> Any:
    repeat = rng.normal(4).abs() + 1
    yield rng.normal(3, 7), _i32(0, 2, -1, 2), _i32(6, 0, 3, 1), rng.normal(4), repeat, rng.normal(4), {}
    yield rng.normal(2, 5), _i32(1), _i32(4), torch.tensor([-torch.inf]), torch.ones(1), torch.zeros(1), {}
    yield rng.normal(2, 5), _i32(), _i32(), *(torch.empty(0) for _ in range(3)), {}


@greedy.cases
def _(rng: Any) -> Any:
    yield rng.normal(3, 7), {}
    yield torch.tensor([[1.0, 3.0, 3.0], [-torch.inf] * 3, [2.0, torch.nan, 1.0], [torch.nan] * 3]), {}


@sample.cases
def _(rng: Any) -> Any:
    for r, v in ((1, 5), (6, 97), (5, 1031)):
        u = rng.normal(r).abs().double() % 1.0
        pick = rng.permutation(r)
        yield (rng.normal(r, v) * 3, torch.tensor([0.7, 0.0, 1.5, -1.0, 1.0, 2.0])[:r].contiguous(), pick * 9 - 1,
               (pick % 3).float() / 3 + 0.34, (pick % 2) * 0.02, u, {})
    odd = torch.cat([(rng.normal(2, 200) * 2).round(), torch.full((3, 200), -torch.inf)])      # ties, bans, NaN
    odd[2, 130], odd[3, ::3], odd[4] = 1.0, torch.nan, torch.nan
    yield (odd, torch.full((5,), 0.8), _i32(0, 20, 3, 70, 5), torch.tensor([0.5, 0.9, 0.5, 0.5, 0.5]), torch.zeros(5),
           torch.linspace(0.1, 0.9, 5).double(), {})


@take_tokens.cases
def _(rng: Any) -> Any:
    yield _i32(5, -1, 7, -4), _i32(10, 11, 12, 13), {}


@put_tokens.cases
def _(rng: Any) -> Any:
    yield _i32(10, 11, 12, 13), _i32(2, -1, 0), _i32(1, 2, 3), {}
