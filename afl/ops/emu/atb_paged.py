"""Paged attention of one token per request, on CPU: float32 inside, one rounding of the result."""

import torch

from afl.ops.emu.fia import attend_rows, pages
from afl.ops.emu.register import emulate, require

MOST_BLOCK = 128                        # tokens


@emulate("atb::_npu_paged_attention")
def _paged_attention(
    query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, out, *,
    workspace=None,
):
    """Write attention of query [r h e] over the first context_lens[i] cached tokens of each request into `out`.

    Caches are [blocks, tokens, k, e], or in NZ [blocks, k*e/16, tokens, 16]; context_lens is read on the host.
    """
    halves = (torch.float16, torch.bfloat16)
    require(query.dtype in halves, "query must be float16 or bfloat16", query)
    dtypes = {query.dtype, key_cache.dtype, value_cache.dtype, out.dtype}
    require(len(dtypes) == 1, "query, caches and out must have one dtype", query, key_cache, value_cache, out)
    require(query.dim() == 3 and query.is_contiguous(), "query must be contiguous [requests, heads, channels]", query)
    r, h, e = query.shape
    k = num_kv_heads
    require(h == num_heads, "num_heads must be that of query", num_heads, query)
    require(k > 0 and h % k == 0, "num_heads must be a multiple of num_kv_heads", num_heads, num_kv_heads)
    require(out.shape == query.shape and out.is_contiguous(), "out must be contiguous and shaped like query", out)
    caches = (key_cache, value_cache)
    require(key_cache.dim() == 4 and key_cache.shape == value_cache.shape, "caches need one shape of 4 sizes", *caches)
    require(all(x.is_contiguous() for x in caches), "caches must be contiguous", *caches)
    nd, nz = key_cache.shape[2:] == (k, e), key_cache.shape[3] == 16 and key_cache.shape[1] * 16 == k * e
    require(nd or nz, "caches must hold num_kv_heads heads of query's channels", key_cache, num_kv_heads, query)
    size = key_cache.shape[1 if nd else 2]
    require(size % 16 == 0 and size <= MOST_BLOCK, f"a block must hold a multiple of 16 tokens, at most {MOST_BLOCK}",
            key_cache)
    table, lens = block_table, context_lens
    require(table.dtype == torch.int32 and table.shape[:1] == (r,) and table.dim() == 2,
            "block_table must be int32 with a row per request", table, query)
    require(lens.dtype == torch.int32 and lens.shape == (r,), "context_lens must be int32, one a request", lens, query)
    most, lens = table.shape[1] * size, lens.tolist()
    require(all(1 <= n <= most for n in lens), f"context_lens must lie in 1 .. {most}, what a row of block_table holds",
            lens)
    keys, values = ([pages(x, ids, n, k, not nd) for ids, n in zip(table, lens, strict=True)] for x in caches)
    out.copy_(attend_rows(query, list(range(r + 1)), [-most] * r, lens, keys, values, scale_value)[0])
