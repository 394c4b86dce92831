"""How long a step takes at least: work of each equation by formula, over the chip's peak figures.

A bound, not a prediction: arithmetic, memory, links and host work are each taken at their best and as overlapping
perfectly, so the longest of them is the least that the step can take.
"""

from collections.abc import Iterable
from typing import Any

import attrs

from afl.chip import F, Roofline
from afl.ir.graph import Equation
from afl.ir.kernel import Kernel
from afl.types import HostIntsType, TensorType

# host microseconds: per element of a length list that goes through an operator call, and per call with a host tensor
LIST_US = (0.16, 0.28)
TENSOR_US = (10.0, 20.0)
TENSORS = frozenset({F.ATB_PAGED, F.ATB_NZ})        # features whose operators take lengths as a host tensor
CACHES = ("k_cache", "v_cache")


@attrs.frozen
class Lengths:
    """What the shapes of a step do not say: (new tokens, tokens before them) of every row."""

    rows: tuple[tuple[int, int], ...]

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(n * before + n * (n + 1) // 2 for n, before in self.rows)

    @property
    def keys(self) -> int:
        """Keys that are read, each once per row."""
        return sum(n + before for n, before in self.rows)


@attrs.frozen
class Work:
    """What equations do.  flops: (dtype name, operations) pairs.  bytes: of device memory, read and written.

    link_bytes: sent by this rank.  host_us: (least, most) microseconds of host time for length operands, of which there
    are `host_vectors` with `host_elements` numbers together.
    """

    flops: tuple[tuple[str, float], ...] = ()
    bytes: float = 0
    link_bytes: float = 0
    host_us: tuple[float, float] = (0.0, 0.0)
    host_vectors: int = 0
    host_elements: int = 0

    def __add__(self, o: "Work") -> "Work":
        both = dict(self.flops)
        for name, n in o.flops:
            both[name] = both.get(name, 0) + n
        host = self.host_us[0] + o.host_us[0], self.host_us[1] + o.host_us[1]
        return Work(
            tuple(sorted(both.items())), self.bytes + o.bytes, self.link_bytes + o.link_bytes, host,
            self.host_vectors + o.host_vectors, self.host_elements + o.host_elements,
        )

    def __mul__(self, n: int) -> "Work":
        return Work(
            tuple((k, x * n) for k, x in self.flops), self.bytes * n, self.link_bytes * n,
            (self.host_us[0] * n, self.host_us[1] * n), self.host_vectors * n, self.host_elements * n,
        )


@attrs.frozen
class StepTime:
    """The bound of one step in seconds by resource; None where the chip's figure is unknown."""

    phase: str
    rows: int
    tokens: int
    context: int            # tokens of each row's sequence, new ones included
    flops: float
    bytes: float
    link_bytes: float
    compute_s: float | None
    memory_s: float | None
    link_s: float | None
    host_s: float
    seconds: float | None
    limit: str


def work(e: Equation, k: Kernel, lengths: Lengths, tp: int = 1) -> Work:
    """The work of one equation.

    Products: 2·t·i·o.  Attention: 4·heads·channels per pair, keys and values read once.  Caches are otherwise touched
    only where new tokens are written; an embedding is read by rows.  A ring of tp ranks sends 2(tp-1)/tp of what it
    reduces.
    """
    if e.op.view_of is not None:
        return Work()
    named: dict[str, Any] = {o.name: v.type for o, v in zip(e.op.operands, e.ins, strict=True) if v is not None}
    outs: list[Any] = [v.type for v in e.outs]
    caches = [named[n] for n in CACHES if n in named]
    flops: list[tuple[str, float]] = []
    moved = sum(t.nbytes for n, t in named.items() if isinstance(t, TensorType) and n not in CACHES)
    moved += sum(t.nbytes for t in outs if isinstance(t, TensorType) and t not in caches)
    link = 0.0
    name = e.op.name
    if name == "logits" or name.startswith("linear"):
        x, y = named["x"], outs[0]
        flops.append((_kind(named.get("w", x).dtype), 2.0 * y.shape[0] * y.shape[1] * x.shape[1]))
    elif name == "paged_attention":
        q, cache = named["q"], named["k_cache"]
        flops.append((_kind(q.dtype), 4.0 * q.shape[1] * q.shape[2] * lengths.pairs))
        moved += 2 * lengths.keys * cache.shape[2] * cache.shape[3] * cache.dtype.itemsize
    elif caches:
        tokens = outs[0].shape[0] if outs[0] not in caches else named["k"].shape[0]
        moved += sum(tokens * c.shape[2] * c.shape[3] * c.dtype.itemsize for c in caches)
    elif name.startswith("embed"):
        moved = named["token"].nbytes + 2 * outs[0].nbytes          # rows of the table, not the table
    elif e.op.effect == "comm":
        link = 2 * (tp - 1) / tp * outs[0].nbytes
    lists = _host_vectors(e, k)
    return Work(tuple(flops), moved, link, _host_us(lists, k), len(lists), sum(lists))


def total(pairs: Iterable[tuple[Equation, Kernel]], lengths: Lengths, tp: int = 1) -> Work:
    """The work of all equations of a program."""
    made = Work()
    for e, k in pairs:
        made += work(e, k, lengths, tp)
    return made


def step_time(phase: str, w: Work, lengths: Lengths, r: Roofline) -> StepTime:
    """The bound of a step on a chip with these figures; without a peer link, what links carry goes through the host."""
    peaks = [(n, r.flops.get(kind, 0.0)) for kind, n in w.flops]
    compute = None if any(not peak for _, peak in peaks) else sum(n / peak for n, peak in peaks)
    memory = w.bytes / r.memory_bytes_per_s if r.memory_bytes_per_s else None
    link_speed = r.link_bytes_per_s or r.host_bytes_per_s
    link = 0.0 if not w.link_bytes else w.link_bytes / link_speed if link_speed else None
    host = sum(w.host_us) / 2 * 1e-6
    parts = {"compute": compute, "memory bandwidth": memory, "link": link, "host lengths": host}
    known = {name: s for name, s in parts.items() if s is not None}
    limit = max(known, key=known.__getitem__)
    whole = None if compute is None or memory is None else known[limit]
    return StepTime(
        phase, len(lengths.rows), sum(n for n, _ in lengths.rows), max(n + m for n, m in lengths.rows),
        sum(n for _, n in w.flops), w.bytes, w.link_bytes, compute, memory, link, host, whole,
        limit if whole is not None else "unknown: the chip has no figures",
    )


def _host_vectors(e: Equation, k: Kernel) -> list[int]:
    """Sizes of the operands that the kernel takes on the host."""
    return [v.type.size for o, v in zip(e.op.operands, e.ins, strict=True)
            if v is not None and o.name in k.host and isinstance(v.type, HostIntsType)]


def _host_us(lists: list[int], k: Kernel) -> tuple[float, float]:
    if not lists:
        return 0.0, 0.0
    return TENSOR_US if k.needs & TENSORS else (sum(lists) * LIST_US[0], sum(lists) * LIST_US[1])


def _kind(dtype: Any) -> str:
    """The name of a dtype in `Roofline.flops`; float32 products run on the 16-bit units of no chip here."""
    return str(dtype).removeprefix("torch.")
