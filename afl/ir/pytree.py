"""Tells torch's pytrees about `@struct` classes, so that torch.export, vmap and friends can walk our trees."""

import functools
from typing import Any

from torch.utils import _pytree

from afl import tree


@functools.cache
def register_pytrees() -> None:
    """Register every struct class, present and future.  Called where torch first meets trees; more calls do nothing."""
    tree.watch_structs(_register)


def _register(cls: type) -> None:
    dynamic, fixed = tree.struct_fields(cls)

    def split(x: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(x, n) for n in dynamic], tuple(getattr(x, n) for n in fixed)

    def split_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return [(_pytree.GetAttrKey(n), getattr(x, n)) for n in dynamic], tuple(getattr(x, n) for n in fixed)

    def join(children: Any, statics: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(dynamic, children, strict=True)), **dict(zip(fixed, statics, strict=True)))

    name = f"{cls.__module__}.{cls.__qualname__}"
    _pytree.register_pytree_node(cls, split, join, flatten_with_keys_fn=split_with_keys, serialized_type_name=name)
