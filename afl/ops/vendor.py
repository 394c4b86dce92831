"""The vendor's operators, `npu.npu_rms_norm(...)` and `atb._npu_paged_attention(...)`: the only way to call them.

The first use of either decides, for the life of the process, whether they are the vendor's own or those of
`afl/ops/emu`; the text of a kernel is the same for both.
"""

from typing import Any

import torch


class Namespace:
    """Operators of one namespace by name, looked up once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from afl.ops.emu.register import register

        register()
        found = getattr(getattr(torch.ops, self._name), name)
        setattr(self, name, found)
        return found


npu = Namespace("npu")
atb = Namespace("atb")
