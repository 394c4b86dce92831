"""Trees of immutable values: `@struct` classes, tuples and dicts are nodes, everything else is a leaf.

A struct is a frozen attrs class whose fields are sub-trees, except `static(...)` fields, which belong to the
structure.  None is an empty tree.  Imports nothing but attrs, so planners can use it without torch.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

import attrs

from afl.errors import AflError, UseAfterDonation

C = TypeVar("C", bound=type)
X = TypeVar("X")

evolve = attrs.evolve
_STRUCTS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # class -> (child fields, static fields)
_WATCHERS: list[Callable[[type], None]] = []                        # told of every struct class (pytree registration)


def static(default: Any = attrs.NOTHING, **kw: Any) -> Any:
    """A field that is part of a struct's structure, not of its leaves; must be hashable."""
    return attrs.field(default=default, metadata={"static": True}, **kw)


@dataclass_transform(frozen_default=True, field_specifiers=(static, attrs.field))
def struct(cls: C) -> C:
    """Make `cls` a frozen attrs class (slots, compared by identity) and a tree node.

    >>> @struct
    ... class Pair:
    ...     a: int
    ...     b: int
    ...     kind: str = static("p")
    >>> leaves(Pair(1, 2))
    [1, 2]
    """
    cls.__getattr__ = _donated  # type: ignore[attr-defined]
    made = attrs.frozen(cls, eq=False, repr=False, slots=True)
    made.__repr__ = _repr  # type: ignore[method-assign]
    fields = attrs.fields(made)
    _STRUCTS[made] = (
        tuple(f.name for f in fields if not f.metadata.get("static")),
        tuple(f.name for f in fields if f.metadata.get("static")),
    )
    for tell in _WATCHERS:
        tell(made)
    return made


def watch_structs(tell: Callable[[type], None]) -> None:
    """Call `tell` for every struct class, present and future."""
    _WATCHERS.append(tell)
    for cls in list(_STRUCTS):
        tell(cls)


def struct_fields(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the child fields and of the static fields of a struct class."""
    return _STRUCTS[cls]


@attrs.frozen(cache_hash=True)
class TreeDef:
    """The structure of a tree without its leaves."""

    node: Any                           # a struct class, tuple, dict, None (empty) or "leaf"
    keys: tuple[Any, ...] = ()          # dict keys, or the static values of a struct
    children: tuple["TreeDef", ...] = ()


LEAF = TreeDef("leaf")
EMPTY = TreeDef(None)


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """The leaves, in field order, and the structure."""
    out: list[Any] = []
    return out, _flatten(tree, out)


def _flatten(t: Any, out: list[Any]) -> TreeDef:
    if t is None:
        return EMPTY
    kind = type(t)
    names = _STRUCTS.get(kind)
    if names is not None:
        children = tuple(_flatten(getattr(t, n), out) for n in names[0])
        return TreeDef(kind, tuple(getattr(t, n) for n in names[1]), children)
    if isinstance(t, tuple):
        return TreeDef(tuple, (), tuple(_flatten(x, out) for x in t))
    if kind is dict:
        return TreeDef(dict, tuple(t), tuple(_flatten(x, out) for x in t.values()))
    if kind is list:
        raise AflError("a list inside a tree can be changed behind its owner's back; hold a tuple instead")
    out.append(t)
    return LEAF


def unflatten(treedef: TreeDef, leaves: Any) -> Any:
    """Inverse of `flatten`; `leaves` must be exactly as many as the structure has."""
    it = iter(leaves)
    tree = _unflatten(treedef, it)
    if next(it, _END) is not _END:
        raise AflError("more leaves than the tree has places for")
    return tree


_END = object()


def _unflatten(d: TreeDef, it: Iterator[Any]) -> Any:
    if d.node == "leaf":
        x = next(it, _END)
        if x is _END:
            raise AflError("fewer leaves than the tree has places for")
        return x
    if d.node is None:
        return None
    children = [_unflatten(c, it) for c in d.children]
    if d.node is tuple:
        return tuple(children)
    if d.node is dict:
        return dict(zip(d.keys, children, strict=True))
    dynamic, fixed = _STRUCTS[d.node]
    return d.node(**dict(zip(dynamic, children, strict=True)), **dict(zip(fixed, d.keys, strict=True)))


def leaves(tree: Any) -> list[Any]:
    """The leaves of `tree` in field order."""
    return flatten(tree)[0]


def map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `fn` leaf by leaf; `rest` must have the structure of `tree`."""
    xs, d = flatten(tree)
    others = []
    for r in rest:
        ys, e = flatten(r)
        if e != d:
            raise AflError("trees of different structure cannot be mapped together")
        others.append(ys)
    return unflatten(d, [fn(*group) for group in zip(xs, *others, strict=True)])


def paths(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) pairs such as ("layers.0.q_norm", tensor)."""
    if tree is None:
        return
    names = _STRUCTS.get(type(tree))
    if names is not None:
        pairs: Any = ((n, getattr(tree, n)) for n in names[0])
    elif isinstance(tree, tuple):
        pairs = ((str(i), x) for i, x in enumerate(tree))
    elif type(tree) is dict:
        pairs = ((str(k), x) for k, x in tree.items())
    else:
        yield prefix, tree
        return
    for name, child in pairs:
        yield from paths(child, f"{prefix}.{name}" if prefix else name)


def at(tree: Any, path: str) -> Any:
    """The sub-tree at a dotted path, as `paths` spells it."""
    for part in path.split(".") if path else ():
        if isinstance(tree, tuple):
            tree = tree[int(part)]
        elif type(tree) is dict:
            tree = tree[part]
        else:
            tree = getattr(tree, part)
    return tree


# ---- donation -------------------------------------------------------------------------------------------------


def poison(tree: Any, where: str) -> None:
    """Empty every struct of a donated tree; a later read raises `UseAfterDonation` naming `where`."""
    names = _STRUCTS.get(type(tree))
    if names is not None:
        for n in names[0]:
            try:
                child = getattr(tree, n)
            except UseAfterDonation:
                continue
            poison(child, where)
            object.__delattr__(tree, n)
        _GRAVES[id(tree)] = where
    elif isinstance(tree, tuple):
        for x in tree:
            poison(x, where)
    elif type(tree) is dict:
        for x in tree.values():
            poison(x, where)


_GRAVES: dict[int, str] = {}  # id of an emptied struct -> call that took it; a hint for the message only


def _donated(self: Any, name: str) -> Any:
    if type(self) in _STRUCTS and name in _STRUCTS[type(self)][0]:
        where = _GRAVES.get(id(self), "a donating call")
        raise UseAfterDonation(
            f"{type(self).__name__}.{name} was read after {where} had taken it; "
            "use the state that the call returned, or pass a copy (tree.map(torch.clone, state))"
        )
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _repr(self: Any) -> str:
    """At most twenty lines: one per leaf, with shape and dtype where it has them."""
    rows = []
    try:
        for path, x in paths(self):
            rows.append(f"  {path}: {_leaf(x)}")
    except UseAfterDonation:
        return f"{type(self).__name__}(donated)"
    if len(rows) > 18:
        rows = rows[:12] + [f"  ... {len(rows) - 16} more"] + rows[-4:]
    return "\n".join([f"{type(self).__name__}(", *rows, ")"]) if rows else f"{type(self).__name__}()"


def _leaf(x: Any) -> str:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')}[{','.join(str(n) for n in shape)}]"
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."


def size_of(tree: Any) -> int:
    """Bytes held by the tensors or arrays of a tree."""
    return sum(getattr(x, "nbytes", sys.getsizeof(x)) for x in leaves(tree))
