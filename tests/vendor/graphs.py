"""The decode programs of one chip in torch_npu's own graphs, over the stub.

    CANN_STUB_SOC=Ascend910B3 PYTHONPATH=. python tests/vendor/graphs.py a2                        (prints JSON)

A model of random weights lies on the device.  Its greedy and its sampling decode program run once as programs, and are
then captured by `afl.ir.capture` with the driver of an NPU and replayed with lengths of their own.  What the operator
library was asked to launch must be the same in both; each replay must re-issue the attention of every layer with the
lists of that step.  Nothing is computed.
"""

import ctypes
import functools
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from afl import device, plugins, tree
from afl.device_fake import UPDATABLE
from afl.device_npu import NpuDriver
from afl.errors import CaptureError
from afl.ir.capture import Arena, Pool, arena_bytes, capture, problems
from afl.ir.program import compile_graph
from afl.ir.trace import trace
from afl.ops.linear import linear
from afl.run.load import random_model
from afl.run.memory import Pool as CachePool
from afl.run.memory import tokens_of_block
from afl.run.pack import batch_of, fills_of, leaves_of
from afl.run.programs import greedy_program, sample_program
from afl.run.sampling import FILLS, Edits, SampleRows
from afl.run.sampling import leaves_of as sample_leaves
from afl.types import DTYPES, HostInts, TensorType

LAYERS, ROWS, WIDTH = 3, 4, 2
SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=96, max_position_embeddings=256, tie_word_embeddings=False,
)


def vendor() -> Any:
    package = device.vendor_package()
    assert package is not None, "torch_npu cannot be imported here"
    return package


class Launches:
    """What the operator library is asked to launch."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libopapi.so")
        self.library.stub_launches.restype = ctypes.c_char_p

    def of(self, fn: Callable[[], Any]) -> tuple[list[str], Any]:
        """The operators launched by a call, in order, and its result."""
        vendor().npu.synchronize()         # launches are queued on another thread
        self.library.stub_forget()
        out = fn()
        vendor().npu.synchronize()
        return self.library.stub_launches().decode().split(), out


class Listening(NpuDriver):
    """Keeps what is launched inside of a capture, without what ran before it."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches, self.captured = launches, []

    def capture(self, fn: Callable[[], Any], pool: Any) -> Any:
        self.captured, graph = self.launches.of(lambda: super(Listening, self).capture(fn, pool))
        return graph


def on_device(t: Any) -> Any:
    return torch.zeros(t.shape, dtype=t.dtype, device="npu")


def batch(lens: list[int]) -> Any:
    r, kv = len(lens), np.array(lens, np.int32)
    blocks = 1 + np.arange(2 * r, dtype=np.int32).reshape(r, 2)
    return batch_of(np.zeros(r, np.int32), kv - 1, blocks[:, 0] * 128, np.arange(r + 1, dtype=np.int32), kv, blocks,
                    np.arange(r, dtype=np.int32))


def sampling(r: int) -> tuple[Any, ...]:
    rows = SampleRows(torch.ones(r), torch.zeros(r).int(), torch.ones(r), torch.zeros(r), torch.zeros(r).double())
    none = Edits(*(torch.empty(0, dtype=t) for t in (torch.int32, torch.int32, *3 * (torch.float32,))))
    return sample_leaves(rows, none)


def decode(model: Any, launches: Launches) -> dict[str, Any]:
    """The report on the decode programs, as plain data."""
    cache = CachePool(9, tokens_of_block(model.caches, model.chip), 0, 256, "")
    params = tree.map(lambda x: x.to("npu"), model.params)
    state = [on_device(t) for t in tree.leaves(model.state_types(cache.blocks, cache.block_tokens, ROWS))]
    driver, found, wrong = Listening(launches), {}, []
    pool, arena = Pool(driver.pool()), None
    fills = fills_of(1)
    # the larger one first
    for name, make, sizes, more in (("sample", sample_program, {"edits": 1}, sampling),
                                    ("greedy", greedy_program, {}, lambda r: ())):
        bound = make(model, cache).bind(params).program(tokens=ROWS, rows=ROWS, width=WIDTH, **sizes)
        arena = arena or Arena(driver, arena_bytes(bound.program), 2)
        graph = capture(bound, state, arena, (*fills, *(FILLS if more(1) else ())), driver, pool)
        hosts = [v for v in bound.program.inputs[len(state) :]]
        given = [q.device for q in graph.places]
        idle = [x if x is not None else HostInts(np.zeros(v.type.size, np.int32))
                for x, v in zip(given, hosts, strict=True)]
        plain, _ = launches.of(functools.partial(bound, *state, *idle))
        if driver.captured != plain:
            wrong.append(f"{name}: captured launches {driver.captured}, the program's {plain}")
        attention = [n for n in plain if "Attention" in n]
        if len(attention) != LAYERS or len(graph.renewals) != LAYERS:
            wrong.append(f"{name}: {len(attention)} attentions, {len(graph.renewals)} renewals for {LAYERS} layers")
        for lens in ([5, 130, 77, 12], [6, 131], [9]):
            again, out = launches.of(functools.partial(graph.run, (*leaves_of(batch(lens)), *more(len(lens)))))
            want = {"actual_seq_lengths": [1, 2, 3, 4],
                    "actual_seq_lengths_kv": lens + [1] * (ROWS - len(lens))}
            records = graph.graph._graph.graph_dispatch_mode.graph_dispatch_records
            got = [{k: r.kwargs[k] for k in want} for r in records]
            if got != [want] * LAYERS:
                wrong.append(f"{name}, lengths {lens}: the recorded calls hold {got}")
            if [n for n in again if "Attention" in n] != attention:
                wrong.append(f"{name}, lengths {lens}: the replay re-issued {again}")
            if [x.data_ptr() for x in out] != [x.data_ptr() for x in graph.graph.outputs[len(state) :]]:
                wrong.append(f"{name}: results moved")
        found[name] = plain
    return {"launches": found, "problems": wrong, "graphs": pool.graphs}


def refused(model: Any) -> dict[str, Any]:
    """A chip that captures nothing: why, by the plan; and the equation that torch_npu itself fails at."""
    cache = CachePool(9, tokens_of_block(model.caches, model.chip), 0, 256, "")
    bound = greedy_program(model, cache).program(tokens=ROWS, rows=ROWS, width=WIDTH)
    rows = problems(bound, (), NpuDriver())
    dtype = DTYPES[model.chip.dtypes[0]]
    x, w = TensorType((4, 64), dtype), TensorType((96, 64), dtype, "nz")
    program = compile_graph(trace(lambda x, w: linear(x, w), x, w), model.chip, name="product")
    stored = vendor().empty_with_format((96, 64), dtype=dtype, device="npu", acl_format=29)
    stored.afl_fmt = "nz"  # type: ignore[attr-defined]
    driver = NpuDriver()
    said = "torch_npu captured it"
    try:
        driver.capture(lambda: program.bind()(on_device(x), stored), driver.pool())
    except (RuntimeError, CaptureError) as e:
        said = f"{str(e).strip().splitlines()[0][:160]} | {' '.join(getattr(e, '__notes__', ()))}"
    return {"problems_of_the_plan": rows, "torch_npu": said}


def tables() -> list[str]:
    """Where the emulation's table of operators that can be renewed differs from torch_npu's."""
    handlers = importlib.import_module("torch_npu.npu._npugraph_handlers.npugraph_handler")._NPU_GRAPH_OP_HANDLERS
    rows, driver = [], NpuDriver()
    for op, want in UPDATABLE.items():
        name = op.partition("::")[2]
        specs = {k: i for o in (".default", ".out") if f"{name}{o}" in handlers
                 for _, i, k in handlers[f"{name}{o}"].get_update_specs(f"{name}{o}")}
        if specs != want or driver.updatable(op) != frozenset(want):
            rows.append(f"{op}: torch_npu renews {specs}, the table says {want}")
    return rows


def main(name: str) -> dict[str, Any]:
    chip = plugins.chip(name)
    model = random_model("LlamaForCausalLM", SIZES, seed=1, chip=name, max_seqs=ROWS)
    with torch.inference_mode():
        captures = not any(not k.capturable for k in greedy_program(model, CachePool(
            9, tokens_of_block(model.caches, chip), 0, 256, "")).program(
                tokens=ROWS, rows=ROWS, width=WIDTH).program.plan.kernels)
        out = decode(model, Launches()) if captures else refused(model)
    memory = NpuDriver().memory()
    return {"chip": name, "captures": captures, "tables": tables(), "memory": memory.total > 0, **out}


if __name__ == "__main__":
    vendor().npu.config.allow_internal_format = True
    print(json.dumps(main(sys.argv[1])))
