"""Attention over a paged cache, and the write of new keys and values into it.

Shapes: q [t h e]; caches [b s k e] (b blocks of s tokens); `blocks` [r w] is each row's table of block ids, padded with
the null block 0; tokens of row i are q_start[i] .. q_start[i+1]-1 and stand at the end of its kv_len[i] cached tokens.
"""

from typing import Any

import torch
from torch import Tensor

from afl.ir.op import FLOAT, INT32, Index, T, op
from afl.types import HostInts, TensorType


@op
def write_kv(
    k_cache: T[Tensor, "b s k e", FLOAT], v_cache: T[Tensor, "b s k e", "k_cache"],
    k: T[Tensor, "t k e", "k_cache"], v: T[Tensor, "t k e", "k_cache"],
    slot: T[Tensor, "t", INT32, Index("b*s", none=True)],
) -> tuple[T[Tensor, "b s k e", "k_cache"], T[Tensor, "b s k e", "k_cache"]]:
    """The caches with token i at slot[i] = block * s + offset; slot -1 writes nothing.  Slots are distinct."""
    real = slot >= 0
    at = slot[real].long()
    k2, v2 = k_cache.contiguous().clone(), v_cache.contiguous().clone()     # flatten must give a view
    k2.flatten(0, 1)[at] = k[real]
    v2.flatten(0, 1)[at] = v[real]
    return k2, v2


@op
def paged_attention(
    q: T[Tensor, "t h e", FLOAT], k_cache: T[Tensor, "b s k e", "q"], v_cache: T[Tensor, "b s k e", "q"],
    blocks: T[Tensor, "r w", INT32, Index("b")],
    q_start: T[Tensor, "r+1", INT32, Index("t+1")], kv_len: T[Tensor, "r", INT32, Index("w*s+1")],
    q_start_h: T[HostInts, "r+1"], kv_len_h: T[HostInts, "r"],
    *, scale: float,
) -> T[Tensor, "t h e", "q"]:
    """Causal grouped-query attention of the new tokens over their rows' cached keys and values.

    softmax(q k^T * scale) v in float32; query head j reads kv head j // (h/k).  Tokens past q_start[-1] are padding
    and yield zeros.  Lengths come twice, as tensors and on the host: a kernel takes the form that its vendor op wants.
    """
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    for i, n in enumerate(kv_len_h.list):
        a, z = q_start_h.list[i], q_start_h.list[i + 1]
        if a == z:
            continue
        used = blocks[i, : -(-n // k_cache.shape[1])].long()
        k = k_cache[used].flatten(0, 1)[:n].float().repeat_interleave(group, 1)      # [n h e]
        v = v_cache[used].flatten(0, 1)[:n].float().repeat_interleave(group, 1)
        scores = torch.einsum("the,nhe->htn", q[a:z].float(), k) * scale
        seen = torch.arange(n) <= torch.arange(n - (z - a), n)[:, None]              # [t n]
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[a:z] = torch.einsum("htn,nhe->the", p, v).to(q.dtype)
    return out


@paged_attention.rule
def _(q: TensorType, *rest: Any, scale: float) -> TensorType:
    from afl.errors import TypeRuleError

    k_cache = rest[0]
    if q.shape[1] % k_cache.shape[2]:
        raise TypeRuleError(f"{q.shape[1]} query heads are not a multiple of {k_cache.shape[2]} kv heads")
    if q.shape[2] != k_cache.shape[3]:
        raise TypeRuleError(f"query heads have {q.shape[2]} channels, cached ones {k_cache.shape[3]}")
    return q


def _lengths(q_lens: list[int], kv_lens: list[int]) -> tuple[Any, ...]:
    q_start = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    kv_len = torch.tensor(kv_lens, dtype=torch.int32)
    return q_start, kv_len, HostInts(q_start.numpy()), HostInts(kv_len.numpy())


@write_kv.cases
def _(rng: Any) -> Any:
    for t, s, k, e in ((1, 4, 1, 8), (5, 4, 3, 14), (7, 16, 2, 48)):
        caches = rng.normal(7, s, k, e), rng.normal(7, s, k, e)
        slot = (rng.permutation(6 * s)[:t] + s).to(torch.int32)
        slot[t // 2 :: 3] = -1 if t > 1 else slot[0]
        yield *caches, rng.normal(t, k, e), rng.normal(t, k, e), slot, {}


@paged_attention.cases
def _(rng: Any) -> Any:
    for q_lens, kv_lens, h, k, e, padding, s in (
        ([1], [1], 1, 1, 8, 0, 4), ([1, 1, 1], [5, 13, 8], 6, 2, 16, 0, 4), ([7, 1, 3], [7, 9, 14], 6, 3, 14, 0, 4),
        ([5, 1, 0], [11, 6, 0], 4, 1, 8, 3, 4), ([16], [16], 3, 3, 8, 0, 4),
        # blocks as the NPU chips have them
        ([1, 1], [130, 3], 6, 2, 16, 0, 128), ([7, 1], [7, 129], 4, 2, 32, 0, 128),
        ([1, 1, 0], [6, 2, 0], 2, 1, 16, 1, 128), ([5, 1, 0], [133, 6, 0], 4, 1, 16, 3, 128),
    ):
        w = 4 if s == 4 else 2
        b = 1 + w * len(q_lens)
        table = (rng.permutation(b - 1) + 1).to(torch.int32).reshape(len(q_lens), w)
        q = rng.normal(sum(q_lens) + padding, h, e)
        caches = rng.normal(b, s, k, e), rng.normal(b, s, k, e)
        yield q, *caches, table, *_lengths(q_lens, kv_lens), {"scale": e**-0.5}
