"""What a victim's blocks become: dropped and computed again, or moved to host memory and back, whichever is cheaper.

The price of either is that of `afl/sched/cost.py`, from figures of the chip, the model and the host link.

swap          "auto": by cost; "always", "never"
chip_flops    effective floating-point operations per second
memory_gbps   effective bytes per second of device memory, in 1e9
link_gbps     effective bytes per second of the host link, one way, in 1e9
params        active parameters of the model
weight_bytes  bytes per parameter
kv_bytes      bytes of cache per token over all layers
descriptor_us cost of one copy descriptor
descriptors   descriptors per block: layers x tensors, 1 if copies are merged
attention     floating-point operations of attention per pair of tokens, over all layers: layers x heads x 2 x channels
"""

from afl.sched.cost import Figures, recompute_seconds, swap_seconds
from afl.sched.policies.registry import register

DEFAULTS = dict(
    swap="auto", chip_flops=2.65e14, memory_gbps=928.0, link_gbps=51.2, params=8.0e9, weight_bytes=2.0,
    kv_bytes=131072.0, descriptor_us=5.0, descriptors=64, attention=262144.0)


def action(s, row, params):
    """Swap if it costs less engine time than computing again what the prefix cache will not have."""
    if params["swap"] != "auto":
        return "swap" if params["swap"] == "always" else "recompute"
    tokens = int(s.sched[row])
    f = Figures(**{k: params[k] for k in DEFAULTS if k != "swap"})
    chunk = s.config.max_step_tokens
    kept = still_cached(s, row)
    blocks = int(s.held[s.lanes(row)].sum())
    return "swap" if swap_seconds(f, tokens, kept, blocks) < recompute_seconds(f, tokens, kept, chunk) else "recompute"


def still_cached(s, row):
    """Tokens of the row's prefix that others hold too, so that they outlive it."""
    if not s.config.prefix_cache:
        return 0
    refs, n = s.pool.part(2), 0
    for block in s.blocks_of(row)[0]:
        if refs[block] < 2:
            break
        n += s.config.groups[0].block_tokens
    return min(n, int(s.sched[row]))


def rules(policy, params):
    """swap is one of three words."""
    if params["swap"] in ("auto", "always", "never"):
        return []
    return [f"swap is {params['swap']!r}; it can be auto, always or never"]


register("recompute", action=action, rules=rules, params=DEFAULTS, needs=("host",))
