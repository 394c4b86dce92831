"""Ascend 950 (A5): 950PR for prefill, 950DT for decode.

Sources: [public] product pages, [code] values in the vendor's or users' published software, [assumed] neither.
"""

from afl.chip import Chip, F, Limits, Roofline, register


def _bin(name: str, memory: int, bandwidth: float) -> Roofline:
    return Roofline(
        bin=name, flops={"float16": 500e12, "bfloat16": 500e12, "float8": 1e15, "float4": 2e15},
        memory_bytes=memory << 30, memory_bytes_per_s=bandwidth, link_bytes_per_s=2e12, host_bytes_per_s=64e9,
        sources={"flops": "float8 and float4 public, 16 bits assumed to be half of float8", "memory_bytes": "public",
                 "memory_bytes_per_s": "public", "link_bytes_per_s": "public, both ways",
                 "host_bytes_per_s": "assumed"},
    )


register(Chip(
    name="a5",
    soc=("Ascend950PR_9579", "Ascend950PR_9589", "Ascend950PR_9599", "Ascend950DT_9591", "Ascend950DT_95A1"),
    features=frozenset({F.NPU, F.ROTARY_MUL, F.SCATTER_PA, F.FIA}),
    dtypes=("bfloat16", "float16"),
    limits=Limits(
        memory_bytes=128 << 30,
        block_tokens=(128, (128,)),
        graph_streams=1800,                     # [assumed] as on the chips before it
        cube_cores=36, vector_cores=72,         # [code] 950PR_9599 and 950DT
    ),
    rooflines=(_bin("950PR", 128, 1.6e12), _bin("950DT", 144, 4e12)),
    layouts={"linear.weight": "nd", "head.weight": "nd", "embed.weight": "nd", "kv.paged": "bsnd"},
    prefer={"paged_attention": ("fia",)},
    note="Ascend 950",
))
