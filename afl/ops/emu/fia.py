"""Fused attention of the vendor on CPU, layout TND: float32 inside, one rounding of the result.

A device may feed the probabilities to its matrix unit in 16 bits and rescales them block by block; this one does not.
"""

import math

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from afl.ops.emu.register import emulate, require
from afl.ops.kernels.loops import f32, loops

TEMPLATE = 2048                         # rows and columns of the mask that modes 2, 3 and 4 read
MOST_GROUP, MOST_CHANNELS, MOST_ROWS, MOST_PAGE = 64, 512, 65536, 65535
FAR = 2**31 - 1
_CAUSAL = WeakIdKeyDictionary()         # masks that were found to be the template


@loops
def attend(t, n, h, k, e, f, low, high, fix, pq, pk, pv, scale, scores, py, plse):
    """One request: q [t h e] over keys [n k e] and values [n k f]; token i sees keys i + low ... i + high - 1.

    A token's bits depend on its own query and keys only.  Without a key: zeros if `fix`, else NaN.
    """
    q, y, lse = carray(f32(pq), (t, h, e)), carray(f32(py), (t, h, f)), carray(f32(plse), (t, h))
    key, value = carray(f32(pk), (n, k, e)), carray(f32(pv), (n, k, f))
    group = h // k
    for i in range(t):
        first, last = max(0, i + low), min(n, i + high)
        for head in range(h):
            x, out, kv = q[i, head], y[i, head], head // group
            for c in range(f):
                out[c] = np.float32(0) if fix or first < last else np.float32(np.nan)
            lse[i, head] = np.float32(-np.inf)
            if first >= last:
                continue
            most = np.float32(-np.inf)
            for j in range(first, last):
                row, total = key[j, kv], np.float32(0)
                for c in range(e):
                    total += x[c] * row[c]
                scores[j] = total * scale
                most = max(most, scores[j])
            mass = np.float32(0)
            for j in range(first, last):
                p, row = np.float32(math.exp(scores[j] - most)), value[j, kv]
                mass += p
                for c in range(f):
                    out[c] += p * row[c]
            for c in range(f):
                out[c] /= mass
            lse[i, head] = most + np.float32(math.log(mass))


def attend_rows(
    q: Tensor, starts: list[int], low: list[int], high: list[int], keys: list[Tensor], values: list[Tensor],
    scale: float, fix: bool = True,
) -> tuple[Tensor, Tensor]:
    """(out [t h f] in q's dtype, lse f32 [t h]): request i has tokens starts[i] .. starts[i+1]-1 of q [t h e].

    keys[i] [n k e] and values[i] [n k f] are its cache; its token j sees keys j + low[i] ... j + high[i] - 1.
    """
    t, h, e = q.shape
    x = q.float().contiguous()
    k, f = values[0].shape[1:]
    out, lse = torch.empty((t, h, f)), torch.empty((t, h))
    scores = np.empty(max(len(v) for v in values), np.float32)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        a, z = starts[i], starts[i + 1]
        if z > a:
            key, value = key.float().contiguous(), value.float().contiguous()
            attend(z - a, len(key), h, k, e, f, low[i], high[i], fix, x[a].data_ptr(), key.data_ptr(),
                   value.data_ptr(), np.float32(scale), scores, out[a].data_ptr(), lse[a].data_ptr())
    return out.to(q.dtype), lse


def pages(cache: Tensor, table: Tensor, n: int, heads: int, nz: bool = False) -> Tensor:
    """The first n rows [n k e] of a request whose blocks of cache [b s ...], or in NZ [b x s 16], are `table`."""
    ids = table[: -(-n // cache.shape[2 if nz else 1])]
    inside = len(ids) and 0 <= int(ids.min()) and int(ids.max()) < cache.shape[0]
    require(bool(inside), f"block ids must lie in 0 .. {cache.shape[0] - 1}", table)
    used = cache.index_select(0, ids)
    return (used.transpose(1, 2) if nz else used).flatten(0, 1)[:n].reshape(n, heads, -1)


@emulate("npu::npu_fused_infer_attention_score")
def _fused_infer_attention_score(
    query, key, value, *, pse_shift=None, atten_mask=None, actual_seq_lengths=None, actual_seq_lengths_kv=None,
    dequant_scale1=None, quant_scale1=None, dequant_scale2=None, quant_scale2=None, quant_offset2=None,
    antiquant_scale=None, antiquant_offset=None, key_antiquant_scale=None, key_antiquant_offset=None,
    value_antiquant_scale=None, value_antiquant_offset=None, block_table=None, query_padding_size=None,
    kv_padding_size=None, key_shared_prefix=None, value_shared_prefix=None, actual_shared_prefix_len=None,
    query_rope=None, key_rope=None, key_rope_antiquant_scale=None, num_heads=1, scale=1.0, pre_tokens=FAR,
    next_tokens=FAR, input_layout="BSH", num_key_value_heads=0, sparse_mode=0, inner_precise=0, block_size=0,
    antiquant_mode=0, key_antiquant_mode=0, value_antiquant_mode=0, softmax_lse_flag=False,
):
    """(out [t h f], lse f32 [t h 1], or [0] without softmax_lse_flag) of query [t h e].

    actual_seq_lengths: running sums of query lengths.  With a block table: key and value [blocks, block_size, k*e] and
    actual_seq_lengths_kv one length per request; without: [tokens, k, e] and running sums.
    """
    others = (
        pse_shift, dequant_scale1, quant_scale1, dequant_scale2, quant_scale2, quant_offset2, antiquant_scale,
        antiquant_offset, key_antiquant_scale, key_antiquant_offset, value_antiquant_scale, value_antiquant_offset,
        query_padding_size, kv_padding_size, key_shared_prefix, value_shared_prefix, actual_shared_prefix_len,
        query_rope, key_rope, key_rope_antiquant_scale, antiquant_mode or None, key_antiquant_mode or None,
        value_antiquant_mode or None,
    )
    require(all(x is None for x in others), "shifts, quantised operands, prefixes and split ropes are not emulated")
    require(input_layout == "TND", 'only input_layout "TND" is emulated', input_layout)
    require(query.dtype in (torch.float16, torch.bfloat16), "query must be float16 or bfloat16", query)
    require(query.dtype == key.dtype == value.dtype, "query, key and value must have one dtype", query, key, value)
    require(query.dim() == 3, "query must be [tokens, heads, channels]", query)
    t, h, e = query.shape
    k = num_key_value_heads or num_heads
    require(h == num_heads, "num_heads must be that of query", num_heads, query)
    require(k > 0 and h % k == 0, "num_heads must be a multiple of num_key_value_heads", num_heads, num_key_value_heads)
    require(h // k <= MOST_GROUP, f"at most {MOST_GROUP} query heads share a kv head", num_heads, num_key_value_heads)
    require(e <= MOST_CHANNELS and e % 16 == 0, f"channels must be a multiple of 16, at most {MOST_CHANNELS}", query)
    for x in (query, key, value):
        require(x.is_contiguous(), "query, key and value must be contiguous", x)
    ends: list[int] = actual_seq_lengths or []
    lens: list[int] = actual_seq_lengths_kv or []
    require(bool(ends) and bool(lens), "TND needs actual_seq_lengths and actual_seq_lengths_kv", ends, lens)
    require(len(ends) == len(lens) <= MOST_ROWS, f"both lists need the same number of requests, at most {MOST_ROWS}",
            ends, lens)
    require(_rising(ends), "actual_seq_lengths are running sums: they must not decrease", ends)
    require(ends[-1] == t, "the last of actual_seq_lengths must be the tokens of query", ends, query)
    starts = [0, *ends]
    counts = [z - a for a, z in zip(starts[:-1], ends, strict=True)]
    if block_table is not None:
        keys, values = _paged(key, value, block_table, block_size, lens, counts, k, e)
    else:
        keys, values = _dense(key, value, lens, k, e)
    sizes = [len(x) for x in keys]
    low, high = _bounds(sparse_mode, atten_mask, counts, sizes, pre_tokens, next_tokens)
    require(inner_precise in (0, 1, 2, 3), "inner_precise must be 0 to 3", inner_precise)
    out, lse = attend_rows(query, starts, low, high, keys, values, scale, bool(inner_precise & 2))
    return out, lse[..., None] if softmax_lse_flag else torch.empty(0)


def _rising(lengths: list[int]) -> bool:
    return all(0 <= a <= b for a, b in zip([0, *lengths], lengths, strict=False))


def _paged(
    key: Tensor, value: Tensor, table: Tensor, size: int, lens: list[int], counts: list[int], k: int, e: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of the cache by request; lens[i] of them."""
    require(key.dim() == 3 and value.dim() == 3, "paged key and value must be [blocks, block_size, heads*channels]",
            key, value)
    require(key.shape == value.shape and key.shape[2] == k * e, "paged key and value must have num_key_value_heads "
            "times the channels of query", key, value, k, e)
    require(key.shape[2] <= MOST_PAGE, f"heads times channels of a page are at most {MOST_PAGE}", key)
    require(size == key.shape[1], "block_size must be that of key", size, key)
    step = 16 if max(counts) <= 1 else 128
    require(size % step == 0 and size <= 512, f"block_size must be a multiple of {step}, at most 512, when a request "
            f"has {'one token' if step == 16 else 'several tokens'}", size)
    require(table.dtype == torch.int32 and table.dim() == 2, "block_table must be int32 [requests, blocks]", table)
    require(table.is_contiguous(), "block_table must be contiguous", table)
    require(len(table) == len(lens), "block_table must have a row per request", table, lens)
    most = table.shape[1] * size
    require(all(1 <= n <= most for n in lens), f"actual_seq_lengths_kv must lie in 1 .. {most}, what a row of "
            "block_table holds", lens)
    rows = list(zip(table, lens, counts, strict=True))
    empty = key.new_empty(0, k, e)
    return tuple([pages(x, ids, n, k) if q else empty for ids, n, q in rows] for x in (key, value))  # type: ignore


def _dense(key: Tensor, value: Tensor, lens: list[int], k: int, e: int) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values by request, one behind the other."""
    require(key.dim() == value.dim() == 3 and key.shape[:2] == value.shape[:2], "key and value must be [tokens, heads, "
            "channels] of the same tokens and heads", key, value)
    require(key.shape[1:] == (k, e), "key must have num_key_value_heads heads with query's channels", key, k, e)
    require(_rising(lens), "actual_seq_lengths_kv are running sums without a block table: they must not decrease", lens)
    require(lens[-1] == len(key), "the last of actual_seq_lengths_kv must be the tokens of key", lens, key)
    sizes = [b - a for a, b in zip([0, *lens], lens, strict=False)]
    return list(key.split(sizes)), list(value.split(sizes))


def _bounds(
    mode: int, mask: Tensor | None, counts: list[int], sizes: list[int], before: int, after: int
) -> tuple[list[int], list[int]]:
    """Offsets of the first key that token 0 of each request sees, and of the first one that it does not see again."""
    require(mode in (0, 2, 3, 4), "sparse_mode 0, 2, 3 and 4 are emulated", mode)
    if mode == 0:
        require(mask is None, "sparse_mode 0 with a mask is not emulated", mask)
        return [-FAR] * len(counts), [FAR] * len(counts)
    require(mask is not None and mask.shape == (TEMPLATE, TEMPLATE), f"sparse_mode {mode} needs atten_mask "
            f"[{TEMPLATE}, {TEMPLATE}]", mask)
    assert mask is not None
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), "atten_mask must be bool, int8 or uint8", mask)
    if mask not in _CAUSAL:
        ones = torch.ones(TEMPLATE, TEMPLATE, dtype=torch.bool, device=mask.device)
        require(torch.equal(mask.bool(), ones.triu(1)), "atten_mask must be 1 above the diagonal and 0 elsewhere", mask)
        _CAUSAL[mask] = True
    shift = [0 if mode == 2 else n - q for n, q in zip(sizes, counts, strict=True)]
    if mode != 4:
        return [-FAR] * len(counts), [s + 1 for s in shift]
    require(before >= 0 and after >= 0, "pre_tokens and next_tokens must not be negative", before, after)
    return [s - before for s in shift], [s + after + 1 for s in shift]
