"""Ops that stand for several others where a chip does them in one go; `afl/ops/fusions.py` puts them in."""

from typing import Any

import torch
from torch import Tensor

from afl.errors import TypeRuleError
from afl.ir.op import FLOAT, FLOAT32, INT32, Index, T, op
from afl.ops.attention import write_kv
from afl.ops.rope import rope, split_qkv
from afl.types import TensorType


@op
def qkv_rope_write(
    qkv: T[Tensor, "t n", FLOAT], cos: T[Tensor, "t p", FLOAT32], sin: T[Tensor, "t p", FLOAT32],
    k_cache: T[Tensor, "b s k e", "qkv"], v_cache: T[Tensor, "b s k e", "qkv"],
    slot: T[Tensor, "t", INT32, Index("b*s", none=True)], *, h: int, e: int, interleaved: bool = False,
) -> tuple[T[Tensor, "t h e", "qkv"], T[Tensor, "b s k e", "qkv"], T[Tensor, "b s k e", "qkv"]]:
    """Split a fused projection, rotate q and k, write k and v: (q [t h e], k_cache, v_cache)."""
    q, k, v = split_qkv.reference(qkv, h=h, k=k_cache.shape[2], e=e)
    q = rope.reference(q, cos, sin, interleaved=interleaved)
    k = rope.reference(k, cos, sin, interleaved=interleaved)
    return q, *write_kv.reference(k_cache, v_cache, k, v, slot)


@qkv_rope_write.rule
def _(qkv: TensorType, cos: TensorType, sin: TensorType, k_cache: TensorType, v_cache: TensorType, slot: TensorType, *,
      h: int, e: int, interleaved: bool) -> tuple[TensorType, ...]:
    if k_cache.shape[3] != e or (h + 2 * k_cache.shape[2]) * e != qkv.shape[1]:
        raise TypeRuleError(f"{h} query heads of {e} channels fit {qkv} and {k_cache} badly")
    if 2 * cos.shape[1] > e:
        raise TypeRuleError(f"angles of width {cos.shape[1]} rotate more than {e} channels")
    return TensorType((qkv.shape[0], h, e), qkv.dtype), k_cache, v_cache


@qkv_rope_write.cases
def _(rng: Any) -> Any:
    for t, h, k, e, p in ((1, 2, 1, 8, 4), (5, 6, 3, 14, 5)):
        a = rng.normal(t, p) * 3
        slot = (rng.permutation(24)[:t] + 4).to(torch.int32)
        if t > 1:
            slot[t // 2] = -1
        for interleaved in (False, True):
            caches = rng.normal(7, 4, k, e), rng.normal(7, 4, k, e)
            yield rng.normal(t, (h + 2 * k) * e), a.cos(), a.sin(), *caches, slot, {
                "h": h, "e": e, "interleaved": interleaved}
