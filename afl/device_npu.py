"""The driver of an NPU: torch_npu's streams, events, memory and graphs."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from afl.device import Event, Memory, vendor_package
from afl.errors import CaptureError


class NpuDriver:
    """torch_npu on the current device.  Raises CaptureError where torch_npu cannot be imported."""

    name = "NPU"
    graphs = True

    def __init__(self) -> None:
        if vendor_package() is None:
            raise CaptureError("torch_npu cannot be imported; install afl[npu] and the vendor's libraries")
        self._npu: Any = getattr(torch, "npu")      # noqa: B009 - torch_npu puts it there

    def stream(self) -> AbstractContextManager[Any]:
        return self._npu.stream(self._npu.Stream())

    def event(self) -> Event:
        return self._npu.Event()

    def synchronize(self) -> None:
        self._npu.synchronize()

    def memory(self) -> Memory:
        free, total = self._npu.mem_get_info()
        return Memory(free, total, self._npu.memory_allocated(), self._npu.memory_reserved())

    def device_bytes(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.uint8, device="npu")

    def host_bytes(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.uint8).pin_memory()

    def updatable(self, op: str) -> frozenset[str]:
        handlers = importlib.import_module("torch_npu.npu._npugraph_handlers.npugraph_handler")._NPU_GRAPH_OP_HANDLERS
        name = op.partition("::")[2]
        found = [f"{name}{o}" for o in (".default", ".out") if f"{name}{o}" in handlers]
        return frozenset(key for n in found for _, _, key in handlers[n].get_update_specs(n))

    def pool(self) -> Any:
        return self._npu.graph_pool_handle()

    def capture(self, fn: Callable[[], tuple[Tensor, ...]], pool: Any) -> "NpuGraph":
        graph = self._npu.NPUGraph()
        with self._npu.graph(graph, pool=pool, auto_dispatch_capture=True):
            outputs = fn()
        weak = importlib.import_module("torch_npu._C")._weak_ref_tensor     # the pool owns the memory
        return NpuGraph(self._npu, graph, tuple(weak(x) for x in outputs))


class NpuGraph:
    """A graph of torch_npu, which re-issues every recorded call with new host operands beside the replay."""

    def __init__(self, npu: Any, graph: Any, outputs: tuple[Tensor, ...]) -> None:
        self._npu, self._graph, self.outputs = npu, graph, outputs
        calls = graph.graph_dispatch_mode.graph_dispatch_records
        self.records = tuple(c.op_cache_entry._schema.name for c in calls)
        self._next: list[dict[str, Any]] = []

    def update(self, values: Sequence[Mapping[str, Any]]) -> None:
        self._next = [dict(v) for v in values]

    def replay(self) -> None:
        """The updates are issued behind the replay: it waits for each at the call that needs it.

        The stream of the updates first waits for the replay before, which may not have reached its own yet.
        """
        self._graph.graph_dispatch_mode.update_stream.wait_stream(self._npu.current_stream())
        self._graph.replay()
        if self._next:
            self._graph.update(cpu_update_input=self._next)
            self._next = []
