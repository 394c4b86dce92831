"""When is it cheaper to compute a preempted request again than to move its cache to host memory and back?

Seconds of one request of `tokens` tokens of which `kept` are still cached on the device.  Roofline: the larger of
arithmetic and of reading the weights once per chunk; a copy costs its bytes and its descriptors, out and in.
"""

import attrs


@attrs.frozen
class Figures:
    """Effective figures (peak times efficiency) of chip, host link and model."""

    chip_flops: float         # 1/s
    memory_gbps: float        # 1e9 bytes/s
    link_gbps: float          # 1e9 bytes/s, one way
    params: float             # active parameters
    weight_bytes: float       # per parameter
    kv_bytes: float           # per token
    descriptor_us: float = 0.0
    descriptors: float = 1    # per block
    attention: float = 0.0    # operations per pair of tokens, over all layers


def recompute_seconds(f: Figures, tokens: int, kept: int, chunk: int) -> float:
    """Engine time of computing tokens [kept, tokens) again, alone, in chunks."""
    missing = tokens - kept
    work = 2 * f.params * missing + f.attention * (tokens**2 - kept**2) / 2
    return max(work / f.chip_flops, -(-missing // chunk) * f.params * f.weight_bytes / (f.memory_gbps * 1e9))


def swap_seconds(f: Figures, tokens: int, kept: int, blocks: int) -> float:
    """Time of moving the cache of tokens [kept, tokens) out and in, in `blocks` blocks."""
    one_way = (tokens - kept) * f.kv_bytes / (f.link_gbps * 1e9) + blocks * f.descriptors * f.descriptor_us * 1e-6
    return 2 * one_way


def break_even_gbps(f: Figures) -> float:
    """Round-trip link bandwidth at which both cost the same, attention and fixed costs left out: 2 F kv / (2 P).

    Below it computing again is cheaper.

    >>> f = Figures(2.65e14, 928, 51.2, 8e9, 2, 131072)
    >>> round(break_even_gbps(f), 2)
    4.34
    """
    return f.chip_flops * f.kv_bytes / f.params / 1e9
