"""One chip's kernels over the real torch_npu: each conformance case on its device, against CPU.

    CANN_STUB_SOC=Ascend910B3 PYTHONPATH=tests:tests/ops python tests/vendor/fake_chip.py a2       (prints JSON)

A kernel runs four times: on CPU with the emulated vendor operators; on fake tensors with torch_npu's own shape
functions; on tensors of the stub device, where torch_npu's host code checks arguments by chip, allocates results and
launches operators that compute nothing; and so again while a graph is captured, if kernel and chip say that they can.
The same vendor operators must be called in the same order, and each must give as many results of the same shapes and
dtypes.  On the way no device operand may meet a host one and no device value may be read.  Where an operator cannot
run, its results are taken from the CPU run, so that the rest of the kernel is checked all the same: on fake tensors one
without shape function, on the stub those of atb::.
"""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import conformance
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from afl import device, layout, plugins
from afl.chip import Chip
from afl.ir.kernel import Kernel
from afl.types import DTYPES, SHORT, TensorType

SPACES = ("npu", "atb")
ON_HOST = {"context_lens", "seq_len"}             # operands of atb:: operators that the vendor reads on the host

ACL_FORMAT = {"nz": 29}                        # the vendor's number of a storage format
SHAPES = ((16, 16), (20, 18), (1, 1), (5, 1), (1, 48), (33, 100), (576, 1536))

# operators whose shape function contradicts the operator's documentation, with what is wrong
KNOWN_WRONG = {
    "npu::npu_sparse_flash_attention": "paged TND: the log-sum-exp has shape [k, t, 0] where the operator gives [t, h]",
}


@attrs.frozen
class Seen:
    """One vendor call: the operator with its overload, and the types of its results."""

    name: str
    results: tuple[TensorType, ...]


def has_host_code(func: torch._ops.OpOverload) -> bool:
    """Whether the operator runs on the stub device; those of atb:: need a library of C++ objects."""
    return func.namespace == "npu"


def has_shapes(func: torch._ops.OpOverload) -> bool:
    """Whether torch_npu can tell the result types of this operator."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
               for key in ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd"))


def types(out: Any) -> tuple[TensorType, ...]:
    found = out if isinstance(out, tuple | list) else (out,)
    return tuple(TensorType(tuple(x.shape), x.dtype) for x in found if isinstance(x, Tensor))


class Watch(TorchDispatchMode):
    """Notes the vendor calls of a run on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_dispatch__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in SPACES:
            self.seen.append(Seen(func.name(), types(out)))
        return out


class Follow(TorchDispatchMode):
    """Repeats a run on device tensors; `problems` says where it differs from the calls seen on CPU.

    `runs` tells which vendor operators are executed; the others give the results that they gave on CPU.
    """

    def __init__(self, expected: list[Seen], runs: Callable[[torch._ops.OpOverload], bool]) -> None:
        super().__init__()
        self.expected = expected
        self.runs = runs
        self.seen: list[Seen] = []
        self.problems: list[str] = []

    def __torch_dispatch__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in SPACES:
            return func(*args, **kwargs)
        at, name = len(self.seen), func.name()
        want = self.expected[at] if at < len(self.expected) else None
        if want is None or want.name != name:
            raise AssertionError(f"vendor call {at + 1} is {name}, on CPU it is {want.name if want else 'none'}")
        self.places(func, args, kwargs)
        out = func(*args, **kwargs) if self.runs(func) else assumed(func, args, kwargs, want)
        got = Seen(name, types(out))
        self.seen.append(got)
        if got != want:
            text = f"{name} gives {shown(got.results)} by torch_npu, {shown(want.results)} by the emulation"
            self.problems.append(f"known: {KNOWN_WRONG[name]}; {text}" if name in KNOWN_WRONG else text)
        return out

    def places(self, func: Any, args: Any, kwargs: Any) -> None:
        """Length vectors of atb:: operators lie on the host, every other tensor of a vendor call on the device."""
        for name, x in given(func, args, kwargs).items():
            if isinstance(x, Tensor):
                want = "cpu" if func.namespace == "atb" and name in ON_HOST else "npu"
                if x.device.type != want:
                    self.problems.append(f"{func.name()} needs {name} on {want}, it is on {x.device.type}")


def assumed(func: Any, args: Any, kwargs: Any, want: Seen) -> Any:
    """Results as seen on CPU: an operand where the schema returns one, else an empty tensor."""
    values, out = given(func, args, kwargs), []
    for r, t in zip(func._schema.returns, want.results, strict=True):
        same = [a.name for a in func._schema.arguments if r.alias_info and a.alias_info
                and a.alias_info.before_set == r.alias_info.before_set]
        out.append(values[same[0]] if same else torch.empty(t.shape, dtype=t.dtype, device="npu"))
    return None if not out else out[0] if len(out) == 1 else tuple(out)


def given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of a call by the schema's names."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def shown(found: tuple[TensorType, ...]) -> str:
    return f"({', '.join(map(str, found))})"


def on_device(x: Any) -> Any:
    """A tensor of device npu that lies like x, without its values; host values stay."""
    if not isinstance(x, Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="npu")
    if hasattr(x, "afl_fmt"):
        made.afl_fmt = x.afl_fmt  # type: ignore[attr-defined]
    return made


def in_format(x: Any) -> Any:
    """Like `on_device`, with matrices in the vendor's storage format of that name; formatted caches are plain there."""
    fmt = getattr(x, "afl_fmt", "nd")
    if fmt not in ACL_FORMAT or x.dim() == 4:
        return on_device(x)
    made = vendor().empty_with_format(tuple(x.shape), dtype=x.dtype, device="npu", acl_format=ACL_FORMAT[fmt])
    made.afl_fmt = fmt
    return made


@attrs.frozen
class World:
    """A way to run a kernel on device npu: which vendor operators are executed, and where."""

    name: str
    runs: Callable[[torch._ops.OpOverload], bool]
    place: Callable[[Any], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext      # operands and call
    within: Callable[[], AbstractContextManager[Any]] = nullcontext      # the call alone


FAKE = World("on fake tensors", has_shapes, on_device, around=lambda: FakeTensorMode(allow_non_fake_inputs=True))
HOST = World("by host code", has_host_code, in_format)
CAPTURE = World("in a graph", has_host_code, in_format, within=lambda: torch.npu.graph(torch.npu.NPUGraph()))


def check(k: Kernel, call: conformance.Call, chip: Chip) -> tuple[list[Seen], list[str]]:
    """The vendor calls of one case, and what is wrong with them."""
    with Watch() as cpu:
        try:
            want = types(call.raw(k, call.stored(k, call.copy())))
        except Exception as e:  # a refusal of the emulation is a finding too
            return cpu.seen, [f"on CPU: {type(e).__name__}: {first_line(e)}"]
    problems = [f"{w.name}: {p}" for w in (FAKE, HOST) for p in follow(w, k, call, cpu.seen, want)]
    if not problems and k.capturable and chip.captures:
        problems = [f"{CAPTURE.name}: {p}" for p in follow(CAPTURE, k, call, cpu.seen, want)]
    return cpu.seen, problems


def follow(
    world: World, k: Kernel, call: conformance.Call, seen: list[Seen], want: tuple[TensorType, ...]
) -> list[str]:
    """What differs when the case runs on device tensors."""
    with world.around():
        args = tuple(world.place(x) for x in call.stored(k, call.args))
        with Follow(seen, world.runs) as device_run:
            try:
                with world.within():
                    out = call.raw(k, args)
            except Exception as e:  # whatever torch_npu or torch refuses is the finding
                return [*device_run.problems, f"{type(e).__name__}: {first_line(e)}"]
    problems = device_run.problems
    if len(device_run.seen) != len(seen):
        problems.append(f"{len(device_run.seen)} vendor calls, on CPU {len(seen)}")
    if types(out) != want:
        problems.append(f"results {shown(types(out))}, on CPU {shown(want)}")
    return problems + [f"result {i} is on {x.device}" for i, x in enumerate(out) if x.device.type != "npu"]


def first_line(e: Exception) -> str:
    lines = [s.strip() for s in str(e).splitlines() if s.strip()]
    return lines[0][:300] if lines else "(no message)"


def run(chip: Chip) -> dict[str, Any]:
    """What `check` says about every kernel of the chip that calls the vendor, as plain data."""
    kernels: dict[str, dict[str, Any]] = {}
    for it in conformance.combinations():
        if it.chip.name != chip.name:
            continue
        row = kernels.setdefault(f"{it.op.name}/{it.kernel.name}", {"cases": 0, "calls": [], "problems": []})
        for call in conformance.accepted(it.kernel, chip, it.dtype):
            seen, problems = check(it.kernel, call, chip)
            row["cases"] += 1
            row["calls"] = sorted({*row["calls"], *(s.name for s in seen)})
            row["problems"] += [f"case {call.number} in {SHORT[it.dtype]}: {p}" for p in problems]
    called = sorted({name for row in kernels.values() for name in row["calls"]})
    return {
        "chip": chip.name, "kernels": kernels,
        "with_shapes": [n for n in called if has_shapes(overload(n))],
        "soc": torch.npu.get_device_name(0), "soc_id": vendor().npu.utils.get_soc_version(),
        "storage": storage(chip),
        "formats": sorted(made.name for made in layout.registered().values() if made.fmt in ACL_FORMAT),
    }


def storage(chip: Chip) -> list[str]:
    """Where bytes of a stored matrix differ from what torch_npu allocates for the format of that name."""
    package, found = vendor(), []
    for made in layout.registered().values():
        for shape in (s for s in SHAPES if made.fmt_of(s) in ACL_FORMAT):
            for dtype in (DTYPES[name] for name in chip.dtypes):
                x = package.empty_with_format(shape, dtype=dtype, device="npu", acl_format=ACL_FORMAT[made.fmt])
                want = package.get_storage_size(x) * dtype.itemsize
                got = made.nbytes(shape, dtype), made.empty(shape, dtype).untyped_storage().nbytes()
                if got != (want, want):
                    found.append(f"layout {made.name} of {dtype} {shape}: {got} bytes, torch_npu takes {want}")
    return found


def overload(name: str) -> torch._ops.OpOverload:
    """The operator "npu::name.overload"."""
    space, _, rest = name.partition("::")
    base, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base), which or "default")


def vendor() -> Any:
    package = device.vendor_package()
    assert package is not None, "torch_npu cannot be imported here"
    return package


if __name__ == "__main__":
    vendor()
    torch.npu.config.allow_internal_format = True               # off by default on chips other than 310P
    print(json.dumps(run(plugins.chip(sys.argv[1]))))
