"""Writes into paged caches, in place, on CPU."""

import torch
from torch import Tensor

from afl.ops.emu.register import emulate, require


@emulate("npu::npu_scatter_pa_kv_cache")
def _scatter_pa_kv_cache(
    key, value, key_cache, value_cache, slot_mapping, *, compress_lens=None, compress_seq_offsets=None, seq_lens=None,
    cache_mode="PA_NZ",
):
    """Write key [t k e] and value [t k f] at their slots into key_cache [b s k e] and value_cache [b s k f].

    A negative slot writes nothing.  The vendor does not say what two equal slots do: they are refused.
    """
    compressed = compress_lens is not None or compress_seq_offsets is not None or seq_lens is not None
    require(not compressed, "compressed writes are not emulated; leave compress_lens, ..._offsets and seq_lens out")
    require(cache_mode == "Norm", 'only cache_mode "Norm" is emulated; the default is "PA_NZ"', cache_mode)
    require(key.dim() == value.dim() == 3, "key and value must be [tokens, heads, channels]", key, value)
    require(key_cache.dim() == value_cache.dim() == 4, "caches must be [blocks, tokens, heads, channels]", key_cache,
            value_cache)
    require(key.shape[:2] == value.shape[:2], "key and value must agree in tokens and heads", key, value)
    for new, cache in ((key, key_cache), (value, value_cache)):
        require(new.dtype == cache.dtype, "new rows must have the cache's dtype", new, cache)
        require(new.shape[1:] == cache.shape[2:], "new rows must have the cache's heads and channels", new, cache)
        require(cache.is_contiguous(), "a cache must be contiguous: it is written in place", cache)
        require(new.stride()[1:] == (new.shape[2], 1) or min(new.shape) <= 1, "the rows written must be dense", new)
    same = key_cache.untyped_storage().data_ptr() == value_cache.untyped_storage().data_ptr()
    require(not same or not _overlap(key_cache, value_cache), "the two caches must not share memory", key_cache)
    require(key_cache.shape[:2] == value_cache.shape[:2], "caches must agree in blocks and tokens of a block",
            key_cache, value_cache)
    require(slot_mapping.dtype in (torch.int32, torch.int64), "slot_mapping must be int32 or int64", slot_mapping)
    require(slot_mapping.shape == key.shape[:1], "slot_mapping must have one slot per token", slot_mapping, key)
    real = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping.index_select(0, real).long()
    if not len(slots):
        return
    most = key_cache.shape[0] * key_cache.shape[1]
    require(int(slots.max()) < most, f"slots must lie below {most}", int(slots.max()), key_cache)
    require(len(slots) == 1 or len(slots.unique()) == len(slots), "slots must be distinct", slot_mapping)
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(most, *cache.shape[2:]).index_copy_(0, slots, new.index_select(0, real))


def _overlap(a: Tensor, b: Tensor) -> bool:
    first, last = sorted((a, b), key=Tensor.data_ptr)
    return first.data_ptr() + first.numel() * first.element_size() > last.data_ptr()
