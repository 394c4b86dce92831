"""Devices behind one small interface, and the one place that imports the vendor's package.

A `Driver` gives streams, events, memory and graphs.  `HostDriver` is the one of a host: everything has happened when a
call returns, and nothing is captured.  `afl/device_npu.py` has the one of an NPU, `afl/device_fake.py` captures on a
host what an NPU would capture.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from afl import config
from afl.errors import CaptureError


@attrs.frozen
class Memory:
    """Bytes of a device: what is free, what there is, what tensors hold, and what is held for tensors."""

    free: int
    total: int
    allocated: int
    reserved: int


class Event(Protocol):
    """A point in the work of a device."""

    def record(self) -> None:
        """Put the point behind what has been submitted so far."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the point is reached; at once if it was never recorded."""
        ...


class Graph(Protocol):
    """Work that was captured once and is replayed on the same memory.

    outputs: what the captured function returned; valid until the next replay of any graph of its pool.
    records: the vendor calls with host operands that `update` renews, by operator name, in the order of the calls.
    """

    outputs: tuple[Tensor, ...]
    records: tuple[str, ...]

    def update(self, values: Sequence[Mapping[str, Any]]) -> None:
        """New host operands for the replay that follows: one mapping per record, or a single one for all of them."""
        ...

    def replay(self) -> None:
        """Submit the work again.  What was not renewed is as it was before."""
        ...


class Driver(Protocol):
    """What the runtime asks of a device."""

    name: str
    graphs: bool                        # whether it can capture

    def stream(self) -> AbstractContextManager[Any]:
        """Work submitted inside the block goes to a stream of its own."""
        ...

    def event(self) -> Event: ...

    def synchronize(self) -> None:
        """Wait for all work."""
        ...

    def memory(self) -> Memory: ...

    def device_bytes(self, n: int) -> Tensor:
        """uint8 [n], zeros, on the device."""
        ...

    def host_bytes(self, n: int) -> Tensor:
        """uint8 [n], zeros, on the host, from where the device can copy by itself."""
        ...

    def updatable(self, op: str) -> frozenset[str]:
        """Arguments of a vendor operator ("npu::name") that a captured graph can be given anew."""
        ...

    def pool(self) -> Any:
        """Memory that captured graphs share."""
        ...

    def capture(self, fn: Callable[[], tuple[Tensor, ...]], pool: Any) -> Graph:
        """Run `fn`, which has run before, and keep what it submits to the device."""
        ...


class Reached:
    """An event of a device on which everything has happened already."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class HostDriver:
    """The host: no streams, no graphs."""

    name = "host"
    graphs = False

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> Event:
        return Reached()

    def synchronize(self) -> None:
        pass

    def memory(self) -> Memory:
        free = config.available_memory()
        return Memory(free, free, 0, 0)

    def device_bytes(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.uint8)

    def host_bytes(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.uint8)

    def updatable(self, op: str) -> frozenset[str]:
        return frozenset()

    def pool(self) -> Any:
        raise CaptureError("the host captures no graphs")

    def capture(self, fn: Callable[[], tuple[Tensor, ...]], pool: Any) -> Graph:
        raise CaptureError("the host captures no graphs")


def driver(x: Tensor, emulate_graphs: bool = False) -> Driver:
    """The driver of the device that x lies on; on the host, if asked for, one that captures as an NPU would."""
    if not x.is_cpu:
        from afl.device_npu import NpuDriver

        return NpuDriver()
    if emulate_graphs:
        from afl.device_fake import FakeDriver

        return FakeDriver()
    return HostDriver()


@functools.cache
def vendor_package() -> ModuleType | None:
    """torch_npu, imported now, or None where it is not installed or its libraries are missing.

    The answer never changes in a process: after None the vendor's operators may be defined by others.
    """
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError):
        return None
