"""Calls of emulated vendor operators that must be refused, and good calls to vary; data of test_emulation.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from afl.ops.vendor import atb, npu


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, W = normal(4, 16), normal(6, 16)
ANGLE = normal(1, 4, 1, 8)
HEADS = normal(1, 4, 3, 8)


def apply(**change: Any) -> tuple[Tensor, Tensor]:
    angles = dict(cos=normal(1, 4, 1, 64, seed=2), sin=normal(1, 4, 1, 64, seed=3))
    good: dict[str, Any] = dict(query=normal(1, 4, 3, 64), key=normal(1, 4, 2, 64, seed=1)) | angles
    return npu.npu_apply_rotary_pos_emb(**good | change)


def scatter(**change: Any) -> Any:
    caches = dict(key_cache=normal(3, 4, 2, 8), value_cache=normal(3, 4, 2, 8))
    good = dict(key=normal(3, 2, 8), value=normal(3, 2, 8), slot_mapping=torch.tensor([1, 2, 3]), cache_mode="Norm")
    good |= caches
    args = good | {k: v(good) if callable(v) else v for k, v in change.items()}
    npu.npu_scatter_pa_kv_cache(**args)


def causal(**more: Any) -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.int8, **more).triu(1)


MASK = causal()


def fia(**change: Any) -> tuple[Tensor, Tensor]:
    """A good call with some arguments replaced: two requests of 3 and 1 tokens over 130 and 2 cached ones."""
    good: dict[str, Any] = dict(
        query=normal(4, 4, 16), key=normal(5, 128, 32), value=normal(5, 128, 32, seed=1), atten_mask=MASK,
        actual_seq_lengths=[3, 4], actual_seq_lengths_kv=[130, 2],
        block_table=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32), num_heads=4, num_key_value_heads=2, scale=0.25,
        input_layout="TND", sparse_mode=3, block_size=128,
    )
    return npu.npu_fused_infer_attention_score(**good | change)


DENSE = dict(key=normal(7, 2, 16), value=normal(7, 2, 16), block_table=None, actual_seq_lengths_kv=[5, 7], block_size=0)
FLAT = dict(key=normal(5, 48, 32), value=normal(5, 48, 32), block_size=48)


def paged(**change: Any) -> Tensor:
    """A good decode call with some arguments replaced; returns what was written."""
    good: dict[str, Any] = dict(
        query=normal(2, 4, 16), key_cache=normal(5, 128, 2, 16), value_cache=normal(5, 128, 2, 16, seed=1),
        num_kv_heads=2, num_heads=4, scale_value=0.25, block_table=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        context_lens=torch.tensor([130, 2], dtype=torch.int32), out=normal(2, 4, 16),
    )
    args = good | change
    atb._npu_paged_attention(**args)
    return args["out"]


def both_caches(*shape: int) -> dict[str, Tensor]:
    return dict(key_cache=normal(*shape), value_cache=normal(*shape))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "norm dtype": (lambda: npu.npu_rms_norm(X.double(), W[0].double()), "float16, bfloat16 or float32"),
    "norm gamma dtype": (lambda: npu.npu_rms_norm(X, W[0].half()), "gamma must have the operand's dtype"),
    "norm gamma shape": (lambda: npu.npu_rms_norm(X, normal(15)), "gamma's shape must be the last dimensions"),
    "norm rank": (lambda: npu.npu_rms_norm(normal(*[1] * 9), normal(1)), "1 to 8 dimensions"),
    "add shapes": (lambda: npu.npu_add_rms_norm(X, normal(1, 16), W[0]), "agree in shape"),
    "add dtypes": (lambda: npu.npu_add_rms_norm(X, X.half(), W[0]), "agree in shape and dtype"),
    "add gamma": (lambda: npu.npu_add_rms_norm(X, X, normal(4)), "gamma's shape"),
    "linear dtype": (lambda: npu.npu_linear(X.double(), W.double()), "float of 16 or 32"),
    "linear weight dtype": (lambda: npu.npu_linear(X, W.half()), "weight must have input's dtype"),
    "linear rank": (lambda: npu.npu_linear(X[None], W), "must be matrices"),
    "linear columns": (lambda: npu.npu_linear(X, W[:, :8]), "as many columns"),
    "linear bias": (lambda: npu.npu_linear(X, W, normal(5)), "one number per row"),
    "linear bias dtype": (lambda: npu.npu_linear(X, W, normal(6, dtype=torch.float32)), "bias must have input's"),
    "rope dtype": (lambda: npu.npu_rotary_mul(HEADS.double(), ANGLE.double(), ANGLE.double()), "16 or 32 bits"),
    "rope angle dtype": (lambda: npu.npu_rotary_mul(HEADS, ANGLE.float(), ANGLE.float()), "must have input's dtype"),
    "rope rank": (lambda: npu.npu_rotary_mul(HEADS[0], ANGLE, ANGLE), "4 dimensions"),
    "rope two angles": (lambda: npu.npu_rotary_mul(HEADS, ANGLE, ANGLE[:, :1]), "one shape"),
    "rope mode": (lambda: npu.npu_rotary_mul(HEADS, ANGLE, ANGLE, "quarter"), "half, interleave"),
    "rope rotate": (lambda: npu.npu_rotary_mul(HEADS, ANGLE, ANGLE, "half", W), "not emulated"),
    "rope odd": (lambda: npu.npu_rotary_mul(HEADS[..., :7], ANGLE[..., :7], ANGLE[..., :7]), "even and below 896"),
    "rope wide": (lambda: npu.npu_rotary_mul(*[normal(1, 1, 1, 896)] * 3), "even and below 896"),
    "rope half width": (lambda: npu.npu_rotary_mul(HEADS, ANGLE[..., :4], ANGLE[..., :4]), "must be that of input"),
    "rope broadcast": (lambda: npu.npu_rotary_mul(HEADS, *[normal(1, 2, 1, 8)] * 2), "broadcast over"),
    "rope by head": (lambda: npu.npu_rotary_mul(*[normal(2, 4, 3, 8)] * 3), "broadcast over at least"),
    "rope heads": (lambda: npu.npu_rotary_mul(normal(1, 1, 1000, 2), *[normal(1, 1, 1, 2)] * 2), "below 1000"),
    "rope pairs batch": (lambda: npu.npu_rotary_mul(normal(2, 1, 1, 2), *[normal(2, 1, 1, 2)] * 2, "interleave"),
                         "first dimension of r1"),
    "rope pairs heads": (lambda: npu.npu_rotary_mul(normal(40, 1, 25, 2), *[normal(1, 1, 1, 2)] * 2, "interleave"),
                         "batches times heads"),
    "apply layout": (lambda: apply(layout="TND"), 'only layout "BSND"'),
    "apply mode": (lambda: apply(rotary_mode="interleave"), 'must be "half"'),
    "apply dtype": (lambda: apply(query=normal(1, 4, 3, 64).double()), "16 or 32 bits"),
    "apply dtypes": (lambda: apply(cos=normal(1, 4, 1, 64).float()), "one dtype"),
    "apply rank": (lambda: apply(query=normal(4, 3, 64)), "4 dimensions"),
    "apply channels": (lambda: apply(query=normal(1, 4, 3, 32), key=normal(1, 4, 1, 32)), "64 or 128"),
    "apply key": (lambda: apply(key=normal(1, 3, 1, 64)), "differ in heads only"),
    "apply angles": (lambda: apply(cos=normal(1, 4, 1, 32), sin=normal(1, 4, 1, 32)), "of query"),
    "apply contiguous": (lambda: apply(query=normal(1, 4, 6, 64)[:, :, ::2]), "overwritten"),
    "swiglu odd": (lambda: npu.npu_swiglu(normal(3, 7)), "must be even"),
    "swiglu dim": (lambda: npu.npu_swiglu(normal(3, 8), 2), "a dimension of input"),
    "swiglu dtype": (lambda: npu.npu_swiglu(normal(3, 8).double()), "16 or 32 bits"),
    "scatter mode": (lambda: scatter(cache_mode="PA_NZ"), 'only cache_mode "Norm"'),
    "scatter compressed": (lambda: scatter(seq_lens=torch.ones(1)), "compressed"),
    "scatter rank": (lambda: scatter(key=normal(3, 16)), "tokens, heads, channels"),
    "scatter cache rank": (lambda: scatter(key_cache=normal(3, 4, 16)), "caches must be"),
    "scatter value": (lambda: scatter(value=normal(2, 2, 8)), "agree in tokens"),
    "scatter dtype": (lambda: scatter(key=normal(3, 2, 8).half()), "the cache's dtype"),
    "scatter heads": (lambda: scatter(key=normal(3, 1, 8), value=normal(3, 1, 8)), "the cache's heads"),
    "scatter contiguous": (lambda: scatter(key_cache=normal(3, 4, 2, 16)[..., :8]), "contiguous"),
    "scatter rows": (lambda: scatter(key=normal(3, 2, 16)[..., :8]), "dense"),
    "scatter one memory": (lambda: scatter(value_cache=lambda a: a["key_cache"]), "share memory"),
    "scatter two caches": (lambda: scatter(value_cache=normal(3, 5, 2, 8)), "agree in blocks"),
    "scatter slot dtype": (lambda: scatter(slot_mapping=torch.tensor([1.0, 2, 3])), "int32 or int64"),
    "scatter slot shape": (lambda: scatter(slot_mapping=torch.tensor([1, 2])), "one slot per token"),
    "scatter slot range": (lambda: scatter(slot_mapping=torch.tensor([1, 2, 12])), "below 12"),
    "scatter equal slots": (lambda: scatter(slot_mapping=torch.tensor([1, 2, 1])), "distinct"),
    "fia other operands": (lambda: fia(query_rope=normal(4, 4, 64)), "not emulated"),
    "fia quantised": (lambda: fia(key_antiquant_mode=1), "not emulated"),
    "fia layout": (lambda: fia(input_layout="BSH"), 'only input_layout "TND"'),
    "fia dtype": (lambda: fia(query=normal(4, 4, 16, dtype=torch.float32)), "float16 or bfloat16"),
    "fia dtypes": (lambda: fia(query=normal(4, 4, 16).half()), "one dtype"),
    "fia rank": (lambda: fia(query=normal(4, 64)), "tokens, heads, channels"),
    "fia heads": (lambda: fia(num_heads=2), "num_heads must be that of query"),
    "fia groups": (lambda: fia(num_key_value_heads=3), "multiple of num_key_value_heads"),
    "fia group size": (lambda: fia(query=normal(4, 65, 16), num_heads=65, num_key_value_heads=1), "at most 64"),
    "fia channels": (lambda: fia(query=normal(4, 4, 8)), "multiple of 16"),
    "fia many channels": (lambda: fia(query=normal(4, 4, 528)), "at most 512"),
    "fia contiguous": (lambda: fia(query=normal(4, 8, 16)[:, :4]), "must be contiguous"),
    "fia no lengths": (lambda: fia(actual_seq_lengths=None), "TND needs"),
    "fia list sizes": (lambda: fia(actual_seq_lengths=[4]), "same number of requests"),
    "fia falling": (lambda: fia(actual_seq_lengths=[5, 4]), "must not decrease"),
    "fia negative": (lambda: fia(actual_seq_lengths=[-1, 4]), "must not decrease"),
    "fia last": (lambda: fia(actual_seq_lengths=[2, 3]), "the tokens of query"),
    "fia precision": (lambda: fia(inner_precise=4), "0 to 3"),
    "fia page rank": (lambda: fia(key=normal(5, 128, 2, 16), value=normal(5, 128, 2, 16)), "block_size, heads"),
    "fia page channels": (lambda: fia(key=normal(5, 128, 16), value=normal(5, 128, 16)), "times the channels"),
    "fia page width": (lambda: fia(query=normal(4, 128, 512), key=normal(5, 128, 65536), value=normal(5, 128, 65536),
                                   num_heads=128, num_key_value_heads=128), "at most 65535"),
    "fia block size": (lambda: fia(block_size=64), "block_size must be that of key"),
    "fia block of many": (lambda: fia(**FLAT), "multiple of 128.*several tokens"),
    "fia block of one": (lambda: fia(key=normal(5, 24, 32), value=normal(5, 24, 32), block_size=24,
                                     actual_seq_lengths=[1, 2], query=normal(2, 4, 16)), "multiple of 16.*one token"),
    "fia large block": (lambda: fia(key=normal(3, 640, 32), value=normal(3, 640, 32), block_size=640), "at most 512"),
    "fia table dtype": (lambda: fia(block_table=torch.zeros(2, 2, dtype=torch.int64)), "int32"),
    "fia table strides": (lambda: fia(block_table=torch.zeros(2, 4, dtype=torch.int32)[:, :2]), "contiguous"),
    "fia table rows": (lambda: fia(block_table=torch.zeros(3, 2, dtype=torch.int32)), "row per request"),
    "fia zero length": (lambda: fia(actual_seq_lengths_kv=[130, 0]), "must lie in 1 .. 256"),
    "fia long": (lambda: fia(actual_seq_lengths_kv=[257, 2]), "must lie in 1 .. 256"),
    "fia block id": (lambda: fia(block_table=torch.tensor([[1, 5], [3, 0]], dtype=torch.int32)), "0 .. 4"),
    "fia dense rank": (lambda: fia(**DENSE | dict(key=normal(7, 32), value=normal(7, 32))), "tokens, heads, channels"),
    "fia dense heads": (lambda: fia(**DENSE | dict(key=normal(7, 4, 16), value=normal(7, 4, 16))), "heads with query"),
    "fia dense falling": (lambda: fia(**DENSE | dict(actual_seq_lengths_kv=[8, 7])), "must not decrease"),
    "fia dense last": (lambda: fia(**DENSE | dict(actual_seq_lengths_kv=[5, 6])), "the tokens of key"),
    "fia mode": (lambda: fia(sparse_mode=1), "0, 2, 3 and 4"),
    "fia mode 0": (lambda: fia(sparse_mode=0), "with a mask"),
    "fia no mask": (lambda: fia(atten_mask=None), "needs atten_mask"),
    "fia mask shape": (lambda: fia(atten_mask=MASK[:1024, :1024]), r"\[2048, 2048\]"),
    "fia mask dtype": (lambda: fia(atten_mask=MASK.float()), "bool, int8 or uint8"),
    "fia mask values": (lambda: fia(atten_mask=MASK.T.contiguous()), "above the diagonal"),
    "fia band": (lambda: fia(sparse_mode=4, pre_tokens=-1, next_tokens=0), "not be negative"),
    "paged dtype": (lambda: paged(query=normal(2, 4, 16, dtype=torch.float32)), "float16 or bfloat16"),
    "paged dtypes": (lambda: paged(out=normal(2, 4, 16).half()), "one dtype"),
    "paged query": (lambda: paged(query=normal(2, 8, 16)[:, :4]), "contiguous"),
    "paged heads": (lambda: paged(num_heads=2), "that of query"),
    "paged groups": (lambda: paged(num_kv_heads=3), "multiple of num_kv_heads"),
    "paged out": (lambda: paged(out=normal(2, 4, 8)), "shaped like query"),
    "paged cache rank": (lambda: paged(**both_caches(5, 128, 32)), "4 sizes"),
    "paged cache strides": (lambda: paged(key_cache=normal(5, 128, 2, 32)[..., :16]), "caches must be contiguous"),
    "paged cache heads": (lambda: paged(**both_caches(5, 128, 4, 8)), "num_kv_heads heads"),
    "paged block": (lambda: paged(**both_caches(5, 24, 2, 16)), "multiple of 16"),
    "paged large block": (lambda: paged(**both_caches(5, 256, 2, 16)), "at most 128"),
    "paged table": (lambda: paged(block_table=torch.zeros(2, 2, dtype=torch.int64)), "int32"),
    "paged lens": (lambda: paged(context_lens=torch.tensor([130, 2])), "context_lens must be int32"),
    "paged zero": (lambda: paged(context_lens=torch.tensor([130, 0], dtype=torch.int32)), "1 .. 256"),
}
