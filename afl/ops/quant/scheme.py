"""What a weight scheme is: how a matrix becomes a struct of smaller tensors while its rows arrive.

A scheme lives in one file of this package: the struct, the ops that compute with it, and a `Scheme`.  It stands where a
`Layout` stands for plain weights (`afl/layout.py`): `empty`, `put`, `back`, `types`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from afl.errors import CheckpointError, ConfigError, unknown
from afl.layout import Layout, layout


@attrs.frozen
class Scheme:
    """A way to hold weights in fewer bits.

    encode: float32 rows [n, i] -> named tensors of these rows.  wrap: named tensors -> the weight's struct.
    parts: logical shape -> {name: (shape, dtype)}.  decode: the struct -> float32 [o, i].
    taken: type names of checkpoint files whose rows are taken over exactly -> bytes of rows -> named tensors.
    expert_sliceable: whether one expert of a stacked weight can be cut out and moved.
    form: what is added to the name of a chip's layout for the numbers, when kernels want them in another order.
    """

    name: str
    note: str
    encode: Callable[[Tensor], Mapping[str, Tensor]]
    wrap: Callable[..., Any]
    parts: Callable[[tuple[int, ...]], Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
    decode: Callable[[Any], Tensor]
    taken: Mapping[str, Callable[[Tensor], Mapping[str, Tensor]]] = attrs.field(factory=dict)
    expert_sliceable: bool = True
    form: str = ""


@attrs.frozen
class Store:
    """A scheme on a chip: what a loader fills.  `layouts` says how each part lies."""

    scheme: Scheme
    layouts: Mapping[str, Layout]

    @property
    def name(self) -> str:
        return self.scheme.name

    def _each(self, shape: tuple[int, ...], make: Callable[[Layout, Any, torch.dtype], Any]) -> dict[str, Any]:
        return {n: make(self.layouts[n], s, d) for n, (s, d) in self.scheme.parts(shape).items()}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """An uninitialised weight; the compute dtype plays no part in how it is held."""
        return self.scheme.wrap(**self._each(shape, lambda layout, s, d: layout.empty(s, d)))

    def types(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """The struct with types for leaves."""
        return self.scheme.wrap(**self._each(shape, lambda layout, s, d: layout.types(s, d)))

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return sum(self._each(shape, lambda layout, s, d: layout.nbytes(s, d)).values())

    def put(self, weight: Any, rows: Tensor, at: int) -> None:
        """Write logical rows, encoded on the way."""
        self._write(weight, self.scheme.encode(rows.float()), at)

    def put_taken(self, weight: Any, stored: str, raw: Tensor, at: int) -> None:
        """Write rows that the file holds in a form which this scheme keeps exactly: bytes uint8 [n, row bytes]."""
        self._write(weight, self.scheme.taken[stored](raw), at)

    def _write(self, weight: Any, parts: Mapping[str, Tensor], at: int) -> None:
        for name, value in parts.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise CheckpointError(f"a weight is too large, or not a number, for the scheme {self.name!r}")
            self.layouts[name].put(getattr(weight, name), value, at)

    def back(self, weight: Any) -> Tensor:
        return self.scheme.decode(weight)

    def to(self, x: Tensor) -> Any:
        """x in this scheme."""
        made = self.empty(tuple(x.shape), x.dtype)
        self.put(made, x, 0)
        return made


_SCHEMES: dict[str, Scheme] = {}


def register(made: Scheme) -> Scheme:
    """Make a scheme known by its name."""
    if made.name in _SCHEMES and _SCHEMES[made.name] is not made:
        raise ConfigError(f"weight scheme {made.name!r} is defined twice; rename one of the two")
    _SCHEMES[made.name] = made
    return made


def scheme(name: str) -> Scheme:
    """The scheme of that name."""
    if name not in _SCHEMES:
        raise ConfigError(unknown("weight scheme", name, _SCHEMES))
    return _SCHEMES[name]


def registered() -> dict[str, Scheme]:
    """All schemes by name."""
    return dict(sorted(_SCHEMES.items()))


def store(name: str, layout_name: str) -> Store:
    """The scheme of that name on a chip that lays linear weights out as `layout_name`.

    Numbers of 4 bits, which are uint8 outside, lie in the layout's packed form, `layout_name` + "4".
    """
    made = scheme(name)

    def name_of(dtype: torch.dtype) -> str:
        form = made.form if dtype in (torch.int8, torch.uint8) else ""
        return layout_name + form + "4" * (dtype == torch.uint8)

    return Store(made, {n: layout(name_of(dtype)) for n, (_, dtype) in made.parts((1, 1)).items()})


def groups(x: Tensor, size: int) -> Tensor:
    """x [n, i] as [n, ceil(i / size), size]; the last group is filled up with its own last value, which changes neither
    its largest nor its smallest one."""
    n, i = x.shape
    count = -(-i // size)
    if count * size != i:
        x = torch.cat([x, x[:, -1:].expand(n, count * size - i)], 1)
    return x.unflatten(1, (count, size))


def spread(per_group: Tensor, size: int, i: int) -> Tensor:
    """[n, groups] repeated to [n, i], float32."""
    return per_group.float().repeat_interleave(size, 1)[:, :i]
