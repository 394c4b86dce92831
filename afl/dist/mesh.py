"""A mesh gives names to the axes along which ranks are laid out.

World = dp x pp x tp x cp in the order given, the last axis fastest.
"""

import math

import attrs


@attrs.frozen
class Mesh:
    """Axis names with sizes, row-major over ranks.

    >>> m = Mesh((("dp", 2), ("tp", 4)))
    >>> m.rank({"dp": 1, "tp": 2}), m.group(6, "tp"), m.group(6, "dp")
    (6, (4, 5, 6, 7), (2, 6))
    """

    axes: tuple[tuple[str, int], ...] = ()

    @property
    def world(self) -> int:
        return math.prod(n for _, n in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along an axis; an axis that the mesh lacks has size 1."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name -> place of a rank."""
        out = {}
        for name, n in reversed(self.axes):
            rank, out[name] = divmod(rank, n)
        return out

    def rank(self, coordinate: dict[str, int]) -> int:
        """The rank at a coordinate."""
        r = 0
        for name, n in self.axes:
            r = r * n + coordinate[name]
        return r

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, itself included, in order."""
        c = self.coordinate(rank)
        return tuple(self.rank({**c, axis: i}) for i in range(self.size(axis)))


SINGLE = Mesh()
