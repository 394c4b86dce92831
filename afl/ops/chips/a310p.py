"""Ascend 310P: float16 only, matrices and caches in NZ, no fused paged attention, memory shared with nobody.

Sources: [public] product pages, [code] values in the vendor's or users' published software, [assumed] neither.
"""

from afl.chip import Chip, F, Limits, Roofline, register

register(Chip(
    name="310p",
    soc=("Ascend310P1", "Ascend310P3", "Ascend310P5", "Ascend310P7"),
    features=frozenset({F.NPU, F.ATB_NZ}),
    dtypes=("float16",),
    limits=Limits(
        memory_bytes=24 << 30,
        block_tokens=(128, (64, 128)),
        block_elements=128 * 128,               # [code] block_tokens x head size of the paged attention kernel
        graph_streams=1800,                     # [code] 2048 hardware streams less a reserve of 248
        cube_cores=8, vector_cores=8,           # [assumed]
    ),
    rooflines=(
        Roofline(
            bin="310P3, one of the two on a Duo card",
            flops={"float16": 70e12, "int8": 140e12}, memory_bytes=24 << 30, memory_bytes_per_s=204.8e9,
            host_bytes_per_s=16e9,
            sources={"flops": "public", "memory_bytes": "public", "memory_bytes_per_s": "public",
                     "host_bytes_per_s": "assumed", "link_bytes_per_s": "none: no peer link"},
        ),
    ),
    layouts={"linear.weight": "nz", "head.weight": "nz", "embed.weight": "nd", "kv.paged": "nz"},
    note="Ascend 310P inference card",
))
