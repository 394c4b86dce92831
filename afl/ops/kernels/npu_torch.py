"""Ops that NPU chips compute with torch's own operators: the vendor has no operator for them that would do better.

Every kernel says why.  None has a result whose shape depends on data, none reads a value back to the host.
"""

import torch
from torch import Tensor

from afl.chip import F
from afl.dist.collectives import all_reduce
from afl.ir.kernel import kernel
from afl.ops import basic
from afl.ops.embed import embed, last_rows
from afl.ops.rope import rope_angles, split_qkv
from afl.ops.sample import GREEDY_BELOW, SLACK, edit_logits, greedy, put_tokens, sample, take_tokens

NPU = frozenset({F.NPU})

# elementwise and shape operators: torch's are the vendor's elementwise operators, or views
for _op in (basic.add, basic.sub, basic.mul, basic.div, basic.scale, basic.cast, basic.reshape, basic.getitem):
    kernel(_op, needs=NPU, name="npu_torch")(_op.reference)

kernel(split_qkv, needs=NPU, name="npu_torch")(split_qkv.reference)          # three views
kernel(rope_angles, needs=NPU, name="npu_torch")(rope_angles.reference)      # once a step, float32, on [t, p]
kernel(all_reduce, needs=NPU, name="npu_torch")(all_reduce.reference)        # an axis of one rank


@kernel(embed, needs=NPU, name="npu_torch")
def _embed(token: Tensor, w: Tensor) -> Tensor:
    """A gather of rows is torch's embedding on every device."""
    return torch.nn.functional.embedding(token, w)


@kernel(last_rows, needs=NPU, name="npu_torch")
def _last_rows(x: Tensor, q_start: Tensor) -> Tensor:
    """A gather of r rows, once a step."""
    y = x.index_select(0, (q_start[1:] - 1).clamp(min=0))
    return torch.where((q_start[1:] > q_start[:-1])[:, None], y, 0)


@kernel(greedy, needs=NPU, name="npu_torch")
def _greedy(logits: Tensor) -> Tensor:
    """argmax is torch's; NaN must lose, which it does not do by itself."""
    return torch.where(logits.isnan(), -torch.inf, logits).argmax(-1).to(torch.int32)


@kernel(take_tokens, needs=NPU, name="npu_torch")
def _take_tokens(token: Tensor, last: Tensor) -> Tensor:
    """A gather and a choice over t integers."""
    return torch.where(token < 0, last.index_select(0, (-1 - token).clamp(min=0)), token)


@kernel(put_tokens, needs=NPU, inplace={0: "last"}, name="npu_torch")
def _put_tokens(last: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """A scatter of r integers; what goes nowhere goes behind the end of a copy, which is then written back."""
    n = len(last)
    wide = torch.nn.functional.pad(last, (0, 1))
    return last.copy_(wide.scatter_(0, torch.where(row >= 0, row, n).long(), token)[:n])


@kernel(edit_logits, needs=NPU, name="npu_torch")
def _edit_logits(logits: Tensor, row: Tensor, token: Tensor, bias: Tensor, repeat: Tensor, minus: Tensor) -> Tensor:
    """Sparse edits with rules of our own; one more row takes those that edit nothing."""
    r = len(logits)
    out = torch.nn.functional.pad(logits, (0, 0, 0, 1))
    at = torch.where(row >= 0, row, r).long(), token.long()
    y = torch.where(bias == -torch.inf, -torch.inf, out[at] + bias)
    out.index_put_(at, torch.where(y > 0, y / repeat, y * repeat) - minus)
    return out[:r]


@kernel(sample, needs=NPU, name="npu_torch")
def _sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """npu_top_k_top_p masks by other rules at the borders and takes k up to 1024; seeds must mean the same everywhere.

    The sums are in float64, which the vendor computes on its control processor.
    """
    v = logits.shape[1]
    x = torch.where(logits.isnan(), -torch.inf, logits)
    best = x.argmax(-1)
    most = x.gather(1, best[:, None]).double()
    plain = ~(temperature >= GREEDY_BELOW) | ~torch.isfinite(most[:, 0])
    t = torch.where(plain, 1.0, temperature.double())[:, None]
    p = torch.where(plain[:, None], 0.0, ((x.double() - most) / t).exp())
    p = torch.where(p < min_p.double().clamp(max=1)[:, None] * (1 - SLACK), 0.0, p)
    falling, ids = x.sort(dim=-1, descending=True, stable=True)
    kth = falling.gather(1, (top_k.long() - 1).clamp(0, v - 1)[:, None])
    kept = (x >= kth) | ((top_k <= 0) | (top_k >= v))[:, None]
    p = torch.where(kept, p, 0.0)
    rising = ids.flip(-1)
    mass = p.gather(1, rising).cumsum(-1)
    drop = mass <= (1 - top_p[:, None].double()) * (1 + SLACK) * mass[:, -1:]
    drop = drop & (torch.arange(v, device=x.device) < v - 1) & (top_p < 1)[:, None]
    p = torch.where(torch.zeros_like(drop).scatter(1, rising, drop), 0.0, p)
    total = p.cumsum(-1)
    goal = u * total[:, -1]
    at = (total > goal[:, None]).int().argmax(-1)
    found = total.gather(1, at[:, None])[:, 0] > goal
    last = v - 1 - (p > 0).flip(-1).int().argmax(-1)
    return torch.where(plain, best, torch.where(found, at, last)).to(torch.int32)
