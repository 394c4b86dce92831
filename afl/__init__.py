"""afl: large language models on Ascend NPUs and CPUs, as pure functions.

    import afl
    m = afl.load("smollm2")
    print(m.graph("decode", rows=4))
    print(m.generate(["The capital of France is"], max_tokens=8)[0].text)

Names are resolved on first use, so that `import afl.sched` needs neither torch nor a kernel.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if "torch" not in sys.modules:  # with torch_npu but no vendor libraries, torch's own autoload would raise
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

__version__ = "0.1.0"

_HOMES = {
    "AflError": "afl.errors", "Batch": "afl.models.batch", "Chip": "afl.chip", "Eager": "afl.ir.trace",
    "Checked": "afl.ir.trace", "Engine": "afl.run.engine", "EngineConfig": "afl.config", "Graph": "afl.ir.graph",
    "HostInts": "afl.types", "Mesh": "afl.dist.mesh", "Model": "afl.run.model", "ModelState": "afl.models.batch",
    "Rule": "afl.ir.rewrite", "SamplingParams": "afl.run.sampling", "TensorType": "afl.types", "evolve": "afl.tree",
    "jit": "afl.ir.jit", "kernel": "afl.ir.kernel", "load": "afl.run.load", "op": "afl.ir.op",
    "random_model": "afl.run.load", "static": "afl.tree", "struct": "afl.tree", "trace": "afl.ir.trace",
    "using": "afl.ir.trace",
}
_MODULES = ("chip", "dist", "ir", "models", "ops", "plugins", "run", "sched", "tree")
__all__ = sorted([*_HOMES, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from afl.chip import Chip as Chip
    from afl.config import EngineConfig as EngineConfig
    from afl.errors import AflError as AflError
    from afl.run.load import load as load
    from afl.run.model import Model as Model


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"afl.{name}")
    else:
        raise AttributeError(f"module 'afl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
