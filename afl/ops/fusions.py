"""Rewrite rules, tried in this order.  A rule is two traced functions; names that both have are wildcards.

On a chip that lacks kernels for a replacement the rule is skipped, so rules need no conditions on chips.
"""

from afl.ir.rewrite import Rule
from afl.ops.attention import write_kv
from afl.ops.fused import qkv_rope_write
from afl.ops.rope import rope, split_qkv


def _split_rope_write(qkv, cos, sin, k_cache, v_cache, slot, *, h, k, e, interleaved):
    q, key, v = split_qkv(qkv, h=h, k=k, e=e)
    q, key = rope(q, cos, sin, interleaved=interleaved), rope(key, cos, sin, interleaved=interleaved)
    k_cache, v_cache = write_kv(k_cache, v_cache, key, v, slot)
    return q, k_cache, v_cache


def _qkv_rope_write(qkv, cos, sin, k_cache, v_cache, slot, *, h, k, e, interleaved):
    return qkv_rope_write(qkv, cos, sin, k_cache, v_cache, slot, h=h, e=e, interleaved=interleaved)


RULES = (Rule(_split_rope_write, _qkv_rope_write, name="qkv_rope_write"),)
