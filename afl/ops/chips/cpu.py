"""The host processor: a real chip, and the one every newcomer meets first."""

from afl.chip import Chip, F, Limits, register

CPU = register(Chip(
    name="cpu",
    features=frozenset({F.TORCH_CPU, F.NUMBA}),
    dtypes=("float32", "bfloat16", "float16"),
    limits=Limits(block_tokens=(16, ()), unified_memory=True),
    # panels let a matrix product of any batch read the weight once, in order
    layouts={"linear.weight": "panel", "head.weight": "panel", "embed.weight": "panel", "kv.paged": "bsnd"},
    allows_reference=True,
    note="any host processor that torch and numba run on",
))
