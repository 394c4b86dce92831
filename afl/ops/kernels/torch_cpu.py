"""Kernels of torch's own CPU operators.  Half types are storage: maths runs in float32 (native half is slower here)."""

import torch
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import FLOAT32
from afl.ops.attention import paged_attention, write_kv
from afl.ops.embed import embed
from afl.ops.linear import linear, logits
from afl.types import HostInts


@kernel(linear, needs={F.TORCH_CPU}, dtypes=FLOAT32, name="torch")
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear; the last bit may differ between one row and several."""
    return torch.nn.functional.linear(x, w, bias)


@kernel(logits, needs={F.TORCH_CPU}, dtypes=FLOAT32, name="torch")
def _logits(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w)


@kernel(embed, needs={F.TORCH_CPU}, name="torch")
def _embed(token: Tensor, w: Tensor) -> Tensor:
    """F.embedding takes int32 ids and raises on ids outside the matrix."""
    return torch.nn.functional.embedding(token, w)



@kernel(write_kv, needs={F.TORCH_CPU}, inplace={0: "k_cache", 1: "v_cache"}, name="torch")
def _write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    real = (slot >= 0).nonzero()[:, 0]
    at = slot.index_select(0, real)
    for cache, new in ((k_cache, k), (v_cache, v)):
        slots = cache.view(-1, *cache.shape[2:])      # never a copy, where the write would be lost
        slots.index_copy_(0, at.long(), new.index_select(0, real))
    return k_cache, v_cache


@kernel(paged_attention, needs={F.TORCH_CPU}, name="sdpa")
def _paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, q_start: Tensor, kv_len: Tensor,
    q_start_h: HostInts, kv_len_h: HostInts, *, scale: float,
) -> Tensor:
    """scaled_dot_product_attention row by row over gathered blocks; any dtype."""
    out = torch.zeros_like(q)
    starts = q_start_h.list
    for i, n in enumerate(kv_len_h.list):
        if starts[i + 1] > starts[i]:
            attend_row(q, k_cache, v_cache, blocks[i], starts[i], starts[i + 1], n, scale, out)
    return out


def attend_row(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, a: int, z: int, n: int, scale: float, out: Tensor
) -> None:
    """Write attention of tokens a .. z-1, the last of n cached ones, into out[a:z]."""
    s = k_cache.shape[1]
    used = blocks[: -(-n // s)]
    k = k_cache.index_select(0, used).flatten(0, 1)[:n].float().transpose(0, 1)      # [k n e]
    v = v_cache.index_select(0, used).flatten(0, 1)[:n].float().transpose(0, 1)
    x = q[a:z].float().transpose(0, 1)                                               # [h t e]
    t = z - a
    mask = None if t in (1, n) else torch.ones(t, n, dtype=torch.bool).tril_(n - t)
    y = torch.nn.functional.scaled_dot_product_attention(
        x[None], k[None], v[None], attn_mask=mask, is_causal=t == n and t > 1, scale=scale,
        enable_gqa=k.shape[0] != x.shape[0],
    )
    out[a:z] = y[0].transpose(0, 1).to(q.dtype)
