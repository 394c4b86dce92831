"""Ascend 910C (A3): two dies a package; the figures are those of one die, which is what a rank runs on.

Sources: [public] product pages, [code] values in the vendor's or users' published software, [assumed] neither.
"""

from afl.chip import Chip, F, Limits, Roofline, register

register(Chip(
    name="a3",
    soc=("Ascend910_9362", "Ascend910_9372", "Ascend910_9381", "Ascend910_9382", "Ascend910_9391", "Ascend910_9392"),
    features=frozenset({F.NPU, F.ROTARY_MUL, F.SCATTER_PA, F.FIA, F.ATB_PAGED}),
    dtypes=("bfloat16", "float16"),
    limits=Limits(
        memory_bytes=64 << 30,
        block_tokens=(128, (128,)),
        graph_streams=1800,                     # [code] 2048 hardware streams less a reserve of 248
        cube_cores=24, vector_cores=48,         # [code] 9381, 9391, 9392; 9362 and 9372 have 20 and 40
    ),
    rooflines=(
        Roofline(
            bin="one die of a 910C package",
            flops={"float16": 376e12, "bfloat16": 376e12, "int8": 752e12}, memory_bytes=64 << 30,
            memory_bytes_per_s=1.6e12, link_bytes_per_s=196e9, host_bytes_per_s=64e9,
            sources={"flops": "public", "memory_bytes": "public", "memory_bytes_per_s": "public",
                     "link_bytes_per_s": "public, one way", "host_bytes_per_s": "assumed"},
        ),
    ),
    layouts={"linear.weight": "nd", "head.weight": "nd", "embed.weight": "nd", "kv.paged": "bsnd"},
    prefer={"paged_attention": ("fia", "atb")},
    note="Ascend 910C, Atlas A3",
))
