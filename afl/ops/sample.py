"""Interim sampler ops."""
from typing import Any
import torch
from torch import Tensor
from afl.ir.op import FLOAT32, INT32, Index, T, op
F64 = frozenset({torch.float64})

@op
def edit_logits(logits: T[Tensor, "r v", FLOAT32], row: T[Tensor, "m", INT32, Index("r", none=True)], token: T[Tensor, "m", INT32, Index("v")], bias: T[Tensor, "m", FLOAT32], repeat: T[Tensor, "m", FLOAT32], minus: T[Tensor, "m", FLOAT32]) -> T[Tensor, "r v", FLOAT32]:
    """edits"""
    out = logits.clone()
    real = row >= 0
    r, t = row[real].long(), token[real].long()
    y = out[r, t] + bias[real]
    y = torch.where(y > 0, y / repeat[real], y * repeat[real]) - minus[real]
    out[r, t] = y
    return out

@op
def greedy(logits: T[Tensor, "r v", FLOAT32]) -> T[Tensor, "r", INT32]:
    """argmax"""
    return logits.argmax(-1).to(torch.int32)

@op
def sample(logits: T[Tensor, "r v", FLOAT32], temperature: T[Tensor, "r", FLOAT32], top_k: T[Tensor, "r", INT32], top_p: T[Tensor, "r", FLOAT32], min_p: T[Tensor, "r", FLOAT32], u: T[Tensor, "r", F64]) -> T[Tensor, "r", INT32]:
    """sample"""
    out = logits.argmax(-1)
    for i in range(len(out)):
        if temperature[i] < 1e-5: continue
        l = (logits[i] / temperature[i]).double(); p = l.softmax(-1)
        keep = p >= min_p[i] * p.max()
        k = int(top_k[i])
        if 0 < k < len(p): keep &= p >= p.topk(k).values[-1]
        p = p * keep; p = p / p.sum()
        if top_p[i] < 1:
            s, o = p.sort(descending=True); c = s.cumsum(0) - s; bad = o[c >= top_p[i]]; p[bad] = 0
        cs = p.cumsum(0); idx = int(torch.searchsorted(cs, u[i] * p.sum(), right=True))
        nz = p.nonzero()[:, 0]
        out[i] = min(idx, int(nz[-1]))
    return out.to(torch.int32)

@op
def take_tokens(token: T[Tensor, "t", INT32, Index("2147483647", low="n")], last: T[Tensor, "n", INT32]) -> T[Tensor, "t", INT32]:
    """take"""
    return torch.where(token >= 0, token, last[(-1 - token).clamp(min=0).long()])

@op
def put_tokens(last: T[Tensor, "n", INT32], row: T[Tensor, "r", INT32, Index("n", none=True)], token: T[Tensor, "r", INT32]) -> T[Tensor, "n", INT32]:
    """put"""
    out = last.clone(); real = row >= 0
    out[row[real].long()] = token[real]
    return out
