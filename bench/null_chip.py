"""A chip whose kernels return preallocated results: what is left is the host's own work."""

from typing import Any

import torch

from afl import plugins
from afl.chip import Chip, Limits, register
from afl.ir.kernel import kernel
from afl.ir.op import Op, registered

OVERWRITES = {
    "write_kv": {0: "k_cache", 1: "v_cache"},
    "qkv_rope_write": {1: "k_cache", 2: "v_cache"},
    "put_tokens": {0: "last"},
}


def null_chip(rows: int) -> Chip:
    """Register the chip "null" with one kernel for every op; a step samples token 0 for `rows` rows.

    Nobody reads a result but the sampled tokens, so the other results are one shared scalar: a kernel costs its call.
    """
    plugins.load_ops()
    for op in registered().values():
        inplace = OVERWRITES.get(op.name, {})
        kernel(op, needs={"null"}, name="null", inplace=inplace)(_kernel(op, inplace, rows))
    return register(Chip("null", features=frozenset({"null"}), limits=Limits(block_tokens=(16, ()))))


def _kernel(op: Op, inplace: dict[int, str], rows: int) -> Any:
    """A function with the op's exact signature that returns what it overwrites, or a result made here, once."""
    names = [o.name for o in op.operands]
    dummy = torch.zeros(rows, dtype=torch.int32) if op.name in ("greedy", "sample") else torch.zeros(1)
    outs = ", ".join(inplace.get(i, "dummy") for i in range(1 if op.single else len(op.results or ())))
    args = ", ".join(names + (["*"] if op.params else []) + list(op.params))
    space: dict[str, Any] = {"dummy": dummy}
    exec(f"def fn({args}):\n    return {outs}\n", space)
    return space["fn"]
