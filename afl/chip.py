"""A chip is a frozen value: what it can do (features), its limits, its speeds and how it stores things.

Chips live one per file in `afl/ops/chips/` (or in an installed plugin) and register themselves when that file is
imported.  This module imports neither torch nor kernels, so planners, help texts and errors can read it.
"""

from collections.abc import Mapping
from pathlib import Path

import attrs

from afl.errors import ConfigError, unknown

DTYPE_ALIASES = {"f32": "float32", "float": "float32", "f16": "float16", "half": "float16", "bf16": "bfloat16"}


class F:
    """Feature names that kernels of this package may need.  A plugin may use names of its own."""

    TORCH_CPU = "torch_cpu"   # torch's own CPU operators
    NUMBA = "numba"           # loops compiled for the host processor
    NPU = "npu"               # torch's operators on the device, and the vendor's norms, gates, rotations and products
    ROTARY_MUL = "rotary_mul"     # npu_rotary_mul in both modes and in captured graphs
    SCATTER_PA = "scatter_pa"     # npu_scatter_pa_kv_cache
    FIA = "fia"               # npu_fused_infer_attention_score over paged caches
    ATB_PAGED = "atb_paged"   # _npu_paged_attention over plain caches, lengths in a host tensor
    ATB_NZ = "atb_nz"         # products with NZ weights, _npu_* operators over NZ caches; float16


@attrs.frozen
class Limits:
    """Hard limits of one device; 0 means that the host decides."""

    memory_bytes: int = 0
    block_tokens: tuple[int, tuple[int, ...]] = (16, ())   # default, allowed (empty = any number from 1 on)
    graph_streams: int = 0                                 # captured graphs alive at a time; 0 = no capture
    unified_memory: bool = False                           # device memory is host memory
    block_elements: int = 0                                # tokens of a block x channels of a head; 0 = no limit
    cube_cores: int = 0
    vector_cores: int = 0


@attrs.frozen
class Roofline:
    """Peak figures of one bin for planners: operations per second by dtype name, bytes per second.  0 = unknown.

    `sources` says for each figure where it comes from: "public" (the vendor's or press figures), "code" (read from
    software that the vendor or users publish) or "assumed".
    """

    bin: str = ""
    flops: Mapping[str, float] = attrs.field(factory=dict)
    memory_bytes: int = 0
    memory_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0          # to peers
    host_bytes_per_s: float = 0.0          # to host memory
    sources: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Chip:
    """One kind of device.

    `dtypes` are dtype names, the first is the default.  `layouts` maps a role ("linear.weight", "kv.paged") to a
    storage format.  `prefer` orders kernels of equal priority.  `allows_reference` says whether an op without a
    kernel may run its reference body.  `captures` follows from the limit on graph streams.
    """

    name: str
    soc: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ("float32",)
    limits: Limits = Limits()
    rooflines: tuple[Roofline, ...] = (Roofline(),)      # one per bin, the most common first
    layouts: Mapping[str, str] = attrs.field(factory=dict)
    prefer: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    allows_reference: bool = False
    note: str = ""

    @property
    def roofline(self) -> Roofline:
        """Figures of the most common bin."""
        return self.rooflines[0]

    @property
    def captures(self) -> bool:
        return self.limits.graph_streams > 0

    def __hash__(self) -> int:
        return hash(self.name)


_CHIPS: dict[str, Chip] = {}


def register(chip: Chip) -> Chip:
    """Make a chip known by its name; a second one of the same name is an error."""
    if chip.name in _CHIPS and _CHIPS[chip.name] is not chip:
        raise ConfigError(f"chip {chip.name!r} is defined twice; rename one of the two files")
    _CHIPS[chip.name] = chip
    return chip


def registered() -> dict[str, Chip]:
    """The chips whose files have been imported, by name."""
    return dict(sorted(_CHIPS.items()))


def names() -> list[str]:
    """Names of the chips in this package, read from the file listing without importing them."""
    folder = Path(__file__).parent / "ops" / "chips"
    files = {p.stem for p in folder.glob("*.py") if p.stem != "__init__"}
    # a module's name cannot begin with a digit: a310p.py holds the chip 310p
    return sorted({s[1:] if s[:1] == "a" and s[1:2].isdigit() and s.endswith("p") else s for s in files} | set(_CHIPS))


def get(name: str) -> Chip:
    """The chip of that name; its file must have been imported (`afl.plugins.chip` does so)."""
    if name not in _CHIPS:
        raise ConfigError(unknown("chip", name, names()))
    return _CHIPS[name]
