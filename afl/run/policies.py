"""What one engine supplies to a scheduler policy, and the figures of chip and model that a policy reckons with."""

from typing import Any

import attrs

from afl import sched
from afl.errors import ConfigError
from afl.sched import Policy

SUPPLIED = frozenset({"clock", "timing", "host", "priority", "deadline"})
WHY = {"peers": "compares data-parallel ranks, and there is only one here"}
# of peak: matrix products and device memory as measured on 910B by others, the host link by assumption
EFFICIENCY = {"chip_flops": 0.68, "memory_gbps": 0.58, "link_gbps": 0.8}


def policy_of(text: str) -> Policy:
    """The policy that an engine's option names; a ConfigError if it needs what a single engine cannot supply."""
    policy = Policy.read(text)
    for name in policy.files():
        for need in sched.policies.load(name).needs:
            if need not in SUPPLIED:
                raise ConfigError(f"policy {name!r} {WHY.get(need, f'needs {need!r}, which nobody supplies')}; "
                                  "leave it out")
    return policy


def figured(policy: Policy, model: Any, block_bytes: int, block_tokens: int) -> Policy:
    """The policy with what `recompute` has to know of chip and model, unless its parameters say otherwise.

    A chip without figures, or whose memory is the host's, never swaps unless told to, or unless its three figures are
    given: there the blocks are better in the cache.
    """
    if "recompute" not in policy.files():
        return policy
    roofline, c = model.chip.roofline, model.c
    dtype = str(model.dtype).removeprefix("torch.")
    flops = roofline.flops.get(dtype) or roofline.flops.get(model.chip.dtypes[0], 0.0)
    given = dict(policy.params)
    found: dict[str, Any] = {
        "params": float(model.parameters), "weight_bytes": model.param_bytes / model.parameters,
        "kv_bytes": block_bytes / block_tokens, "descriptors": 2 * c.layers,
        "attention": float(c.layers * c.h * 2 * c.e),
    }
    if flops and roofline.host_bytes_per_s and not model.chip.limits.unified_memory:
        found |= {
            "chip_flops": EFFICIENCY["chip_flops"] * flops,
            "memory_gbps": EFFICIENCY["memory_gbps"] * roofline.memory_bytes_per_s / 1e9,
            "link_gbps": EFFICIENCY["link_gbps"] * roofline.host_bytes_per_s / 1e9,
        }
    elif not {"chip_flops", "memory_gbps", "link_gbps"} <= given.keys():
        found["swap"] = "never"
    return attrs.evolve(policy, params=found | given)
