"""One rank's part of a model, as a Config of smaller sizes: what a step's text computes on local shapes.

Query heads, kv heads, ffn rows and vocabulary rows are cut over `tp`; where there are fewer kv heads than ranks, each
rank holds one of them, shared with its neighbours.  The hidden size is not cut: every layer ends in two all-reduces.
"""

from typing import Any

import attrs


def local(c: Any, tp: int) -> Any:
    """The Config of one of `tp` ranks; the sizes must divide (`afl/run/rules.py`)."""
    if tp == 1:
        return c
    cut = {"h": c.h // tp, "k": max(1, c.k // tp), "v": c.v // tp}
    return attrs.evolve(c, **cut, **({"f": c.f // tp} if hasattr(c, "f") else {}))


def with_layers(c: Any, n: int) -> Any:
    """The same model with n layers."""
    return attrs.evolve(c, layers=n)


def layers_are_alike(specs: Any, caches: tuple[Any, ...]) -> bool:
    """Whether every layer has the same parameters and the same cache, so that one stands for all.

    specs: tree of ParamSpec with a field `layers`; source names are not compared.
    """
    from afl import tree

    def kind(layer: Any) -> Any:
        return [(path, s.shape, s.role, s.dtype) for path, s in tree.paths(layer)]

    layers = getattr(specs, "layers", ())
    if len(layers) != len(caches) or len(set(caches)) > 1:
        return False
    first = kind(layers[0]) if layers else None
    return all(kind(layer) == first for layer in layers[1:])
