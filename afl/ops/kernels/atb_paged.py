"""Decode attention by the vendor's _npu_paged_attention, which takes lengths as a tensor on the host.

Whether every row has one token is known from the host's lengths only, not from types, so the kernel takes any batch and
leaves others to the fused attention.  Chips name the fused attention first; a chip value with
`prefer={"paged_attention": ("atb", "fia")}` decodes through this one.
"""

from typing import Any

import torch
from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.ops.attention import paged_attention
from afl.ops.kernels import fia
from afl.ops.vendor import atb
from afl.types import HostInts


def fits(q: Any, k_cache: Any, *rest: Any, scale: float) -> bool:
    """block of 128 tokens; what the fused attention wants"""
    return k_cache.shape[1] == 128 and fia.fits(q, k_cache, *rest, scale=scale)


@kernel(paged_attention, needs={F.ATB_PAGED, F.FIA}, dtypes=HALF, when=fits, host=("q_start_h", "kv_len_h"),
        capturable=False, name="atb")
def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, q_start: Tensor, kv_len: Tensor,
    q_start_h: HostInts, kv_len_h: HostInts, *, scale: float,
) -> Tensor:
    """Token i is row i, real rows first.  A padding row reads one key of the null block and its result is zeroed.

    Not to be captured: which of two operators it calls follows from the lengths of a step.
    """
    r, starts = len(kv_len), q_start_h.list
    real = starts[-1]
    if len(q) != r or starts != [*range(real + 1), *[real] * (r - real)]:
        return fia.attend(q, k_cache, v_cache, blocks, q_start, kv_len, q_start_h, kv_len_h, scale=scale)
    q = q.contiguous()
    out = torch.empty_like(q)
    lens = kv_len_h.tensor if real == r else kv_len_h.tensor.clamp(min=1)
    atb._npu_paged_attention(
        q, k_cache, v_cache, k_cache.shape[2], q.shape[1], scale, blocks.contiguous(), lens, out
    )
    return out if real == r else torch.where((kv_len > 0)[:, None, None], out, 0)
