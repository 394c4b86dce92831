"""A bound program captured once in a device graph, and replayed on the same memory with new inputs.

State keeps its addresses: a program is only captured if every donated input is overwritten in place.  Other tensors lie
in an `Arena`, which `stage` alone writes.  Host operands are frozen in a graph, so a replay gives each recorded vendor
call its own anew, by the functions that the kernels declare (`afl.ir.kernel.Update`).
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from afl.errors import AflError, CaptureError, violations
from afl.ir.graph import Var, line, numbering
from afl.ir.plan import capture_problems
from afl.ir.program import BoundProgram, Program
from afl.types import HostInts, HostIntsType, TensorType

LAST = "last"                       # a padding value: the last number of the vector once more
ALIGN = 64                          # bytes


@attrs.define(eq=False)
class Pool:
    """Memory that captured programs share.  `reserved`: bytes of temporaries of the first one, the largest."""

    handle: Any
    reserved: int = 0
    graphs: int = 0


class Arena:
    """Static inputs: one buffer on the device, and on the host one per step in flight, copied there in turn."""

    def __init__(self, driver: Any, nbytes: int, depth: int = 1) -> None:
        self.device: Tensor = driver.device_bytes(nbytes)
        self.hosts: list[Tensor] = [driver.host_bytes(nbytes) for _ in range(depth)]
        self.copied = [driver.event() for _ in range(depth)]
        self.turn = 0


@attrs.frozen(eq=False)
class Place:
    """Where one input lies.  `device` is None for a host vector; `hosts` has a view per host buffer of the arena."""

    device: Tensor | None
    hosts: tuple[np.ndarray, ...]
    size: int                       # of the first dimension
    fill: Any                       # what padding holds
    end: int                        # bytes of the arena up to here


@attrs.frozen
class Renewal:
    """One recorded vendor call: equation, operator, arguments, and the group of values that they take."""

    equation: int
    op: str
    keys: tuple[str, ...]
    group: int


@attrs.frozen(eq=False)
class Group:
    """Values that several vendor calls share.  `operands` are types, and for host operands the number of the input."""

    values: Callable[..., Mapping[str, Any]]
    operands: tuple[Any, ...]
    params: tuple[tuple[str, Any], ...]

    def now(self, hosts: Mapping[int, HostInts]) -> Mapping[str, Any]:
        return self.values(*(hosts[x] if isinstance(x, int) else x for x in self.operands), **dict(self.params))


def inputs_of(p: Program) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """The donated inputs, which are the first, and the others."""
    state = set(p.plan.given.values())
    count = sum(v in state for v in p.inputs)
    return p.inputs[:count], p.inputs[count:]


def arena_bytes(p: Program) -> int:
    """What the inputs of a program take in an arena."""
    return sum(_padded(v.type.nbytes) for v in inputs_of(p)[1] if isinstance(v.type, TensorType))


def update_plan(p: Program) -> tuple[tuple[Renewal, ...], tuple[Group, ...]]:
    """Which vendor calls are renewed, in the order of the equations, and by what; equal values are made once."""
    at = {v: i for i, v in enumerate(inputs_of(p)[1])}
    renewals: list[Renewal] = []
    groups: dict[Any, Group] = {}
    for i, (e, k) in enumerate(zip(p.graph.eqns, p.plan.kernels, strict=True)):
        if k.update is None:
            continue
        operands = tuple(None if v is None else at[v] if isinstance(v.type, HostIntsType) else v.type for v in e.ins)
        key = k.update.values, operands, e.params
        groups.setdefault(key, Group(k.update.values, operands, e.params))
        renewals.append(Renewal(i, k.update.op, k.update.keys, list(groups).index(key)))
    return tuple(renewals), tuple(groups.values())


def problems(bound: BoundProgram, state: Sequence[Tensor], driver: Any) -> list[str]:
    """Everything that keeps this program from being captured, each with the equation and the reason; empty if nothing.

    state: the tensors of the donated inputs, or nothing to look at the program only.
    """
    p = bound.program
    n = numbering(p.graph)
    rows = capture_problems(p.plan)
    given = set(p.plan.given.values())
    donated, rest = inputs_of(p)
    rows += [f"donated input {v.name} stands behind inputs that are not" for v in rest if v in given]
    for e, k in zip(p.graph.eqns, p.plan.kernels, strict=True):
        if k.update is not None and k.capturable:
            lacking = ", ".join(sorted(set(k.update.keys) - driver.updatable(k.update.op)))
            if lacking:
                rows.append(f"{k!r} would renew {lacking} of {k.update.op}, which {driver.name} cannot: {line(e, n)}")
            rows += [f"{k!r} takes a host vector that is no input: {line(e, n)}" for v in e.ins
                     if v is not None and isinstance(v.type, HostIntsType) and v not in rest]
    tensors = [(v.name or name, bound.fn.__globals__[name]) for name, v in p.params] if state else []
    homes = {x.untyped_storage().data_ptr(): name for name, x in tensors}
    for v, x in zip(donated, state, strict=False):
        home = x.untyped_storage().data_ptr()
        if home in homes:
            rows.append(f"input {v.name} shares memory with {homes[home]}")
        homes[home] = v.name
    return rows


@attrs.frozen(eq=False)
class Captured:
    """A captured program.  Its results are valid until the next run of any program of its pool."""

    program: BoundProgram
    arena: Arena
    places: tuple[Place, ...]
    graph: Any
    renewals: tuple[Renewal, ...]
    groups: tuple[Group, ...]
    sizes: tuple[Mapping[str, int], ...]        # per group: how long the lists were at capture
    states: int

    def run(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """The results behind the state, for the inputs behind the state; smaller ones are padded."""
        hosts = stage(self.arena, self.places, values)
        if self.renewals:
            self.graph.update(self.host_values(hosts))
        self.graph.replay()
        return self.graph.outputs[self.states :]

    def host_values(self, hosts: Mapping[int, HostInts]) -> list[Mapping[str, Any]]:
        """What the recorded calls are given: one mapping each, or a single one if they all take the same."""
        made = [g.now(hosts) for g in self.groups]
        for new, size in zip(made, self.sizes, strict=True):
            if _sizes(new) != size:
                raise CaptureError(f"a captured call takes lists of {dict(size)} numbers, got {_sizes(new)}; their "
                                   "lengths must follow from types alone")
        return made if len(made) == 1 else [made[r.group] for r in self.renewals]


def capture(
    bound: BoundProgram, state: Sequence[Tensor], arena: Arena, fills: Sequence[Any], driver: Any, pool: Pool
) -> Captured:
    """Run the program on inputs that are all padding, and keep what it submits.

    fills: for each input behind the state what its padding holds, a number or `LAST`.  Largest program first: later
    ones must fit into the memory of the first.  Raises CaptureError with every reason against it.
    """
    p = bound.program
    found = problems(bound, state, driver)
    if found:
        raise CaptureError(violations(f"reasons why {p.name} cannot be captured", found))
    if pool.graphs and p.plan.peak > pool.reserved:
        raise CaptureError(f"{p.name} needs {p.plan.peak} bytes of temporaries, the first program captured in this "
                           f"pool has {pool.reserved}: the pool would grow; capture the largest program first")
    donated, rest = inputs_of(p)
    if len(state) != len(donated) or len(fills) != len(rest):
        raise CaptureError(f"{p.name} has {len(donated)} state inputs and {len(rest)} others, got {len(state)} tensors "
                           f"and {len(fills)} padding values")
    places = _places(arena, rest, fills)
    hosts = stage(arena, places, [_nothing(v) for v in rest])
    inputs = [*state, *(hosts[i] if q.device is None else q.device for i, q in enumerate(places))]
    try:
        with still():
            bound(*inputs)                      # what is made once, such as masks and compiled kernels, is made now
            graph = driver.capture(lambda: bound(*inputs), pool.handle)
    except Exception as e:  # whatever the vendor raises is the reason, and the program's note says where
        notes = "".join(f"\n{x}" for x in getattr(e, "__notes__", ()))
        raise CaptureError(f"{p.name} cannot be captured: {e}{notes}") from e
    moved = [v.name for v, x, y in zip(donated, state, graph.outputs, strict=False) if x.data_ptr() != y.data_ptr()]
    renewals, groups = update_plan(p)
    if moved or graph.records != tuple(r.op for r in renewals):
        rows = [f"state {name} is not returned in place" for name in moved]
        if graph.records != tuple(r.op for r in renewals):
            rows.append(f"the device recorded {list(graph.records)}, the kernels declare {[r.op for r in renewals]}")
        raise CaptureError(violations(f"contradictions of {p.name} as captured", rows))
    pool.reserved, pool.graphs = pool.reserved or p.plan.peak, pool.graphs + 1
    sizes = tuple(_sizes(g.now(hosts)) for g in groups)
    return Captured(bound, arena, places, graph, renewals, groups, sizes, len(state))


def stage(arena: Arena, places: Sequence[Place], values: Sequence[Any]) -> dict[int, HostInts]:
    """Write the inputs of a step, padded, with one copy to the device; the padded host vectors by number of the input.

    A host buffer is written again only when its last copy is done.
    """
    arena.turn = turn = (arena.turn + 1) % len(arena.hosts)
    arena.copied[turn].synchronize()
    hosts: dict[int, HostInts] = {}
    for i, (p, x) in enumerate(zip(places, values, strict=True)):
        new = x.array if isinstance(x, HostInts) else x.numpy()
        if len(new) > p.size:
            raise CaptureError(f"input {i} has {len(new)} rows, the captured program takes {p.size}")
        if p.device is None:
            out = np.empty(p.size, np.int32)
            hosts[i] = HostInts.wrap(out)
        else:
            out = p.hosts[turn]
        _pad(out, new, p.fill)
    if places:
        end = places[-1].end
        arena.device[:end].copy_(arena.hosts[turn][:end], non_blocking=True)
    arena.copied[turn].record()
    return hosts


def _pad(out: np.ndarray, new: np.ndarray, fill: Any) -> None:
    n = len(new)
    if out.ndim == 2:
        w = new.shape[1]
        out[:n, :w], out[:n, w:] = new, fill
    else:
        out[:n] = new
    if n < len(out):
        out[n:] = (new[-1] if n else 0) if fill == LAST else fill


@contextmanager
def still() -> Iterator[None]:
    """No garbage collection inside: one in the middle of a capture costs more than the capture."""
    was, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if was:
            gc.enable()


def _places(arena: Arena, rest: Sequence[Var], fills: Sequence[Any]) -> tuple[Place, ...]:
    places, at = [], 0
    for v, fill in zip(rest, fills, strict=True):
        t = v.type
        if isinstance(t, HostIntsType):
            places.append(Place(None, (), t.size, fill, at))
            continue
        if not 1 <= len(t.shape) <= 2 or t.fmt != "nd":
            raise CaptureError(f"input {v.name} is {t}; static inputs are plain vectors and matrices")
        end = at + t.nbytes
        if end > len(arena.device):
            raise AflError(f"an arena of {len(arena.device)} bytes is too small for input {v.name} at {at}")
        device, *hosts = (x[at:end].view(t.dtype).view(t.shape) for x in (arena.device, *arena.hosts))
        places.append(Place(device, tuple(x.numpy() for x in hosts), t.shape[0], fill, end))
        at = _padded(end)
    return tuple(places)


def _nothing(v: Var) -> Any:
    """An input of no rows."""
    t = v.type
    return HostInts([]) if isinstance(t, HostIntsType) else torch.empty((0,) * len(t.shape), dtype=t.dtype)


def _padded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    return {key: len(x) for key, x in values.items()}
