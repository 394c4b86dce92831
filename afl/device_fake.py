"""Captured graphs on a host, with the contract of an NPU's: what was captured is what is replayed.

While a function is captured every operator call is written on a tape: tensors that come from outside by reference,
results by the call that made them, lists and other host values as they are at that moment.  A replay runs the tape.  So
a length that is not renewed gives the stale answer, a buffer that was exchanged is not seen, and what a branch decided
at capture stays decided.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from afl.device import HostDriver
from afl.errors import CaptureError

# vendor operator -> argument that a captured graph can be given anew -> its position; `make vendor-check` compares
UPDATABLE: dict[str, dict[str, int]] = {
    "npu::npu_fused_infer_attention_score": {"actual_seq_lengths": 5, "actual_seq_lengths_kv": 6},
    "npu::npu_fused_infer_attention_score_v2": {"actual_seq_qlen": 7, "actual_seq_kvlen": 8},
    "atb::_npu_paged_attention": {"context_lens": 7},
    "atb::npu_multi_head_latent_attention": {"context_lens": 5},
}
READERS = ("aten::is_nonzero", "aten::equal", "aten::allclose")     # they read values, and torch does not tag them
GARBAGE = {torch.bool: True, torch.uint8: 249, torch.int8: -7, torch.int16: -7, torch.int32: -(1 << 30) - 7,
           torch.int64: -(1 << 30) - 7}        # of any other dtype: NaN


class FakeDriver(HostDriver):
    """A host that captures.  `updatable_ops`: as `UPDATABLE`, for operators of tests and benches."""

    name = "host, graphs emulated"
    graphs = True

    def __init__(self, updatable_ops: Mapping[str, Mapping[str, int]] = UPDATABLE) -> None:
        self.ops = updatable_ops

    def updatable(self, op: str) -> frozenset[str]:
        return frozenset(self.ops.get(op, ()))

    def pool(self) -> "FakePool":
        return FakePool()

    def capture(self, fn: Callable[[], tuple[Tensor, ...]], pool: "FakePool") -> "FakeGraph":
        return FakeGraph(fn, pool, self.ops)


@attrs.define(eq=False)
class FakePool:
    """Memory that graphs share: what one of them left is overwritten by the next one that runs."""

    last: "FakeGraph | None" = None

    def enter(self, g: "FakeGraph") -> None:
        """`g` runs now: outputs of another graph become garbage."""
        if self.last is not None and self.last is not g:
            with torch.inference_mode():
                for x in self.last.owned:
                    x.fill_(GARBAGE.get(x.dtype, torch.nan))
        self.last = g


@attrs.frozen
class Made:
    """Result number `place` of an earlier call."""

    call: int
    place: int


class Several(list[Any]):
    """An argument that is a list with tensors in it."""


@attrs.frozen(eq=False)
class Call:
    """One operator call of the tape.  `dead`: calls whose results nobody reads after this one."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    dead: list[int]


class FakeGraph:
    """A captured function.  See `afl.device.Graph`."""

    def __init__(
        self, fn: Callable[[], tuple[Tensor, ...]], pool: FakePool, ops: Mapping[str, Mapping[str, int]] = UPDATABLE
    ) -> None:
        self.owned: tuple[Tensor, ...] = ()
        self._pool, self._ops = pool, ops
        pool.enter(self)
        with torch.inference_mode(), _Recorder(ops) as tape:
            self.outputs = tuple(fn())
        self.calls = tape.calls
        self._results = [tape.refer(x) for x in self.outputs]
        homes = {_home(x) for x in tape.given.values()}
        self._own = [isinstance(r, Made) and _home(x) not in homes
                     for r, x in zip(self._results, self.outputs, strict=True)]
        self.owned = tuple(x for x, own in zip(self.outputs, self._own, strict=True) if own)
        self._updated = [c for c in self.calls if c.func._schema.name in ops]
        self.records = tuple(c.func._schema.name for c in self._updated)
        _bury(self.calls, self._results)

    def update(self, values: Sequence[Mapping[str, Any]]) -> None:
        if len(values) not in (1, len(self._updated)):
            raise CaptureError(f"{len(values)} updates for {len(self._updated)} recorded calls; give one each, or one "
                               "for all")
        rows = list(values) * len(self._updated) if len(values) == 1 else values
        for call, new in zip(self._updated, rows, strict=True):
            places = self._ops[call.func._schema.name]
            for key, value in new.items():
                if key in call.kwargs:
                    call.kwargs[key] = value
                elif places.get(key, 1 << 30) < len(call.args):
                    call.args[places[key]] = value

    def replay(self) -> None:
        self._pool.enter(self)
        made: list[Any] = [None] * len(self.calls)
        with torch.inference_mode():
            for i, c in enumerate(self.calls):
                out = c.func(*[_value(x, made) for x in c.args], **{k: _value(x, made) for k, x in c.kwargs.items()})
                made[i] = out if isinstance(out, tuple | list) else (out,)
                for j in c.dead:
                    made[j] = None
            for x, r, own in zip(self.outputs, self._results, self._own, strict=True):
                if own:
                    x.copy_(_value(r, made))


class _Recorder(TorchDispatchMode):
    """Writes the tape.  `given` are the tensors that come from outside."""

    def __init__(self, ops: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__()
        self.ops = ops
        self.calls: list[Call] = []
        self.given: dict[int, Tensor] = {}
        self._made: dict[int, Made] = {}
        self._alive: list[Tensor] = []          # an id stands for a tensor as long as that lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        why = _refusal(func, args)
        if why:
            raise CaptureError(f"{func._schema.name} cannot be captured: {why}")
        call = Call(func, [self.frozen(x) for x in args], {k: self.frozen(x) for k, x in kwargs.items()}, [])
        name = func._schema.name
        if name in self.ops:                    # what the vendor reads on the host is as it is now
            for key, place in self.ops[name].items():
                if key not in call.kwargs and place < len(call.args):
                    call.args[place] = copy.deepcopy(args[place])
        out = func(*args, **kwargs)
        self.calls.append(call)
        for j, x in enumerate(out if isinstance(out, tuple | list) else (out,)):
            if isinstance(x, Tensor) and id(x) not in self._made and id(x) not in self.given:
                self._made[id(x)] = Made(len(self.calls) - 1, j)
                self._alive.append(x)
        return out

    def frozen(self, x: Any) -> Any:
        """An argument as it stands on the tape."""
        if isinstance(x, Tensor):
            return self.refer(x)
        if isinstance(x, tuple | list):
            return Several(map(self.frozen, x)) if any(isinstance(y, Tensor) for y in x) else list(x)
        return x

    def refer(self, x: Tensor) -> Any:
        """A result by its call, any other tensor as itself."""
        if id(x) in self._made:
            return self._made[id(x)]
        self.given.setdefault(id(x), x)
        return x


def _refusal(func: Any, args: Any) -> str | None:
    """Why a device could not capture a call."""
    if torch.Tag.data_dependent_output in func.tags or func._schema.name in READERS:
        return "it reads a value of the device"
    if torch.Tag.dynamic_output_shape in func.tags:
        chosen = args[1] if func._schema.name == "aten::index" else None
        if chosen is None or any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in chosen):
            return "the size of its result depends on values"
    return None


def _bury(calls: list[Call], results: list[Any]) -> None:
    """Note in each call which results are read there for the last time."""
    last: dict[int, int] = {i: i for i in range(len(calls))}
    for i, c in enumerate(calls):
        for x in (*c.args, *c.kwargs.values()):
            for y in x if isinstance(x, Several) else (x,):
                if isinstance(y, Made):
                    last[y.call] = i
    kept = {r.call for r in results if isinstance(r, Made)}
    for j, i in last.items():
        if j not in kept:
            calls[i].dead.append(j)


def _value(x: Any, made: list[Any]) -> Any:
    if type(x) is Made:
        return made[x.call][x.place]
    return [_value(y, made) for y in x] if type(x) is Several else x


def _home(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
