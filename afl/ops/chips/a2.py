"""Ascend 910B (A2).  The bins differ in cores and clock.

Sources: [public] product pages, [code] values in the vendor's or users' published software, [assumed] neither.
"""

from afl.chip import Chip, F, Limits, Roofline, register

_SOURCES = {
    "flops": "public for B3, code for B1", "memory_bytes": "public", "memory_bytes_per_s": "code",
    "link_bytes_per_s": "assumed: 8 chips in a mesh", "host_bytes_per_s": "assumed",
}


def _bin(name: str, flops: float, memory: int) -> Roofline:
    return Roofline(
        bin=name, flops={"float16": flops, "bfloat16": flops, "int8": 2 * flops}, memory_bytes=memory << 30,
        memory_bytes_per_s=1.6e12, link_bytes_per_s=392e9, host_bytes_per_s=64e9, sources=_SOURCES,
    )


register(Chip(
    name="a2",
    soc=("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"),
    features=frozenset({F.NPU, F.ROTARY_MUL, F.SCATTER_PA, F.FIA, F.ATB_PAGED}),
    dtypes=("bfloat16", "float16"),
    limits=Limits(
        memory_bytes=64 << 30,
        block_tokens=(128, (128,)),
        graph_streams=1800,                     # [code] 2048 hardware streams less a reserve of 248
        cube_cores=20, vector_cores=40,         # [code] B3 and B4; B1 and B2 have 24 and 48
    ),
    rooflines=(_bin("B3", 313e12, 64), _bin("B1", 390e12, 64), _bin("B2", 376e12, 64), _bin("B4", 280e12, 32)),
    layouts={"linear.weight": "nd", "head.weight": "nd", "embed.weight": "nd", "kv.paged": "bsnd"},
    prefer={"paged_attention": ("fia", "atb")},
    note="Ascend 910B, Atlas A2",
))
