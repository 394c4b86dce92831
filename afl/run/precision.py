"""What `--dtype` and `--weights` mean on a chip: the dtype of the computation, and how each matrix is held."""

from collections.abc import Callable
from typing import Any

import torch

from afl.chip import DTYPE_ALIASES, Chip
from afl.errors import ConfigError, unknown
from afl.ir.kernel import explain
from afl.ir.trace import trace
from afl.layout import As, layout
from afl.ops.linear import times
from afl.ops.quant import scheme as schemes
from afl.types import DTYPES, TensorType

MATRICES = ("linear.weight", "head.weight", "embed.weight")      # roles that --weights speaks of


def stores(chip: Chip, weights: str, dtype: torch.dtype) -> Callable[[str], Any]:
    """How the parameters of a role are held: the chip's layout, or for matrices the scheme or dtype that is asked for.

    weights: "auto" (the compute dtype), a dtype name, or a scheme of `afl/ops/quant`.  Raises ConfigError for an
    unknown name, and for one that the chip has no kernel for.  Embedding and head lie in int8 under every scheme: they
    are where 4 bits cost most.
    """
    name = DTYPE_ALIASES.get(weights, weights)
    known = ("auto", *chip.dtypes, *schemes.registered())
    if name not in known:
        raise ConfigError(unknown("weights", weights, known))

    def store(role: str) -> Any:
        plain = layout(chip.layouts.get(role, "nd"))
        if role not in MATRICES or name == "auto":
            return plain
        if name in schemes.registered():
            return schemes.store(name if role == "linear.weight" else _outer(name), plain.name)
        return As(plain, DTYPES[name])

    if name != "auto" and (why := _refusal(store("linear.weight"), chip, dtype)):
        raise ConfigError(f"weights {weights!r} cannot be computed on chip {chip.name!r} with dtype "
                          f"{str(dtype).removeprefix('torch.')}; use --weights auto\n{why}")
    return store


def _outer(name: str) -> str:
    """The scheme of embedding and head."""
    return "int8-dynamic" if name.endswith("-dynamic") else "int8"


def _refusal(store: Any, chip: Chip, dtype: torch.dtype) -> str:
    """Why a product with a weight held so has no kernel on the chip, or nothing."""
    x = TensorType((64, 64), dtype)
    found = trace(lambda x, w: times(w, x, None), x, store.types((64, 64), dtype)).graph
    choices = [explain(e.op, tuple(v and v.type for v in e.ins), e.params, chip) for e in found.eqns]
    return "\n".join(str(c) for c in choices if c.chosen is None)
