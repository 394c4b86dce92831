"""Operators of atb:: over NZ caches [blocks, k*e/16, tokens, 16], on CPU: float32 inside, one rounding of the result.

Their limits are those that the vendor's library checks on 310P.  A device holds scores and probabilities in float16.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from afl.ops.emu.fia import FAR, attend_rows, pages
from afl.ops.emu.register import emulate, require

TILE = 16
TEMPLATE = 2048                         # rows and columns of the compressed mask
NORM_COMPRESS = 5                       # mask_type
MOST_HEAD, MOST_BLOCK_ELEMENTS = 256, 128 * 128
_CAUSAL = WeakIdKeyDictionary()         # masks that were found to be the template


def _require_nz(key_cache: Tensor, value_cache: Tensor, k: int, e: int) -> int:
    """Tokens of a block of two NZ caches that hold k heads of e channels."""
    caches = (key_cache, value_cache)
    require(all(x.dim() == 4 and x.shape[3] == TILE for x in caches), "caches must be NZ: [blocks, heads*channels/16, "
            "tokens, 16]", *caches)
    require(key_cache.shape == value_cache.shape, "caches must have one shape", *caches)
    require(all(x.dtype == torch.float16 for x in caches), "caches must be float16", *caches)
    require(all(x.is_contiguous() for x in caches), "caches must be contiguous", *caches)
    require(key_cache.untyped_storage().data_ptr() != value_cache.untyped_storage().data_ptr(),
            "the two caches must not share memory", *caches)
    require(e % TILE == 0 and e <= MOST_HEAD, f"channels must be a multiple of {TILE}, at most {MOST_HEAD}", e)
    require(key_cache.shape[1] * TILE == k * e, "caches must hold all heads and channels", key_cache, k, e)
    size = key_cache.shape[2]
    require(size % TILE == 0, f"a block must hold a multiple of {TILE} tokens", key_cache)
    require(size * e <= MOST_BLOCK_ELEMENTS, f"tokens of a block times channels of a head are at most "
            f"{MOST_BLOCK_ELEMENTS}", key_cache, e)
    return size


@emulate("atb::_npu_reshape_and_cache")
def _reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    """Write key and value [t k e] at their slots into NZ caches, in place; a negative slot writes nothing.

    The vendor does not say what two equal slots do: they are refused.
    """
    require(key.dim() == 3 and key.shape == value.shape, "key and value must be [tokens, heads, channels]", key, value)
    require(key.dtype == value.dtype == torch.float16, "key and value must be float16", key, value)
    require(key.is_contiguous() and value.is_contiguous(), "key and value must be contiguous", key, value)
    t, k, e = key.shape
    size = _require_nz(key_cache, value_cache, k, e)
    slots = slot_indices
    require(slots.dtype == torch.int32 and slots.shape == (t,), "slot_indices must be int32, one a token", slots, key)
    real = slots >= 0
    at = slots[real].long()
    if not len(at):
        return
    most = len(key_cache) * size
    require(int(at.max()) < most, f"slots must lie below {most}", int(at.max()), key_cache)
    require(len(at) == 1 or len(at.unique()) == len(at), "slots must be distinct", slots)
    block, row = at // size, at % size
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[block, :, row] = new[real].view(len(at), -1, TILE)


@emulate("atb::_npu_paged_attention_splitfuse_v2")
def _paged_attention_splitfuse_v2(
    query, key_cache, value_cache, block_table, context_lens, mask, seq_len, num_kv_heads, num_heads, scale_value, *,
    mask_type=5, out,
):
    """Write causal attention of query [t h e] over NZ caches into `out`; request i has the next seq_len[i] tokens.

    They are the last of its context_lens[i] cached ones.  Both length vectors lie on the host.  The mask is a template
    that is valid for all lengths: -10000 above the diagonal, which the vendor adds to the scores.  Tokens beyond the
    sum of seq_len belong to nobody, and what `out` holds there is undefined: NaN here.
    """
    require(query.dim() == 3 and query.is_contiguous(), "query must be contiguous [tokens, heads, channels]", query)
    require(query.dtype == torch.float16, "query must be float16", query)
    t, h, e = query.shape
    k = num_kv_heads
    require(t % TILE == 0, f"query must be padded to a multiple of {TILE} tokens", query)
    require(h == num_heads, "num_heads must be that of query", num_heads, query)
    require(k > 0 and h % k == 0, "num_heads must be a multiple of num_kv_heads", num_heads, num_kv_heads)
    require(out.shape == query.shape and out.dtype == query.dtype and out.is_contiguous(),
            "out must be contiguous and like query", out, query)
    require(out.data_ptr() != query.data_ptr(), "out must not be query", out)
    size = _require_nz(key_cache, value_cache, k, e)
    require(mask_type == NORM_COMPRESS, f"mask_type must be {NORM_COMPRESS}", mask_type)
    _require_template(mask)
    table = block_table
    require(table.dtype == torch.int32 and table.dim() == 2 and table.is_contiguous(),
            "block_table must be contiguous int32 [requests, blocks]", table)
    for lens in (context_lens, seq_len):
        require(lens.dtype == torch.int32 and lens.shape == table.shape[:1], "lengths must be int32, one a request",
                lens, table)
    counts, kept, most = seq_len.tolist(), context_lens.tolist(), table.shape[1] * size
    sound = all(0 <= q <= n <= most for q, n in zip(counts, kept, strict=True))
    require(sound, f"lengths must be 0 <= seq_len <= context_lens <= {most}, what a row of block_table holds", counts,
            kept)
    require(sum(counts) <= t, "seq_len must not count more tokens than query has", counts, query)
    starts = [0]
    for q in counts:
        starts.append(starts[-1] + q)
    none = key_cache.new_empty(0, k, e)
    rows = list(zip(table, kept, counts, strict=True))
    keys, values = ([pages(x, ids, n, k, True) if q else none for ids, n, q in rows] for x in (key_cache, value_cache))
    high = [n - q + 1 for q, n in zip(counts, kept, strict=True)]
    out.copy_(attend_rows(query, starts, [-FAR] * len(high), high, keys, values, scale_value)[0])
    out[starts[-1] :] = torch.nan


def _require_template(mask: Tensor) -> None:
    require(mask.dtype == torch.float16 and mask.shape == (TEMPLATE, TEMPLATE), f"mask must be float16 [{TEMPLATE}, "
            f"{TEMPLATE}]", mask)
    if mask not in _CAUSAL:
        want = torch.full((TEMPLATE, TEMPLATE), -10000.0, dtype=torch.float16).triu(1)
        require(torch.equal(mask, want), "mask must be -10000 above the diagonal and 0 elsewhere", mask)
        _CAUSAL[mask] = True
