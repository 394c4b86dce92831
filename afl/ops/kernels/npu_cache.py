"""Writes of keys and values into plain paged caches of the NPU chips."""

from torch import Tensor

from afl.chip import F
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.ops.attention import write_kv
from afl.ops.vendor import npu


@kernel(write_kv, needs={F.SCATTER_PA}, dtypes=HALF, inplace={0: "k_cache", 1: "v_cache"}, name="npu_scatter_pa")
def scatter(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """npu_scatter_pa_kv_cache in its "Norm" mode: rows of one token are dense; slot -1 writes nothing."""
    npu.npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slot, cache_mode="Norm")
    return k_cache, v_cache
