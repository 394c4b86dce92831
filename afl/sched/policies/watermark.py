"""Keep a share of the blocks free at admission, so that running requests can grow without preempting each other.

watermark  share of all blocks, 0 to 1, that must stay free after an admission while something else runs.
"""

from afl.sched import notes
from afl.sched.policies.registry import register
from afl.sched.policy import Verdict

notes.TEXT["watermark"] = "{a} blocks would stay free, the watermark is {b}"


def admit(c, params):
    """Object while the blocks left would be fewer than the watermark."""
    keep = int(params["watermark"] * c.s.config.blocks)
    if c.running and c.spare - c.blocks < keep:
        return Verdict("watermark", c.spare - c.blocks, keep)


def rules(policy, params):
    """A share."""
    return [] if 0 <= params["watermark"] < 1 else [f"watermark is {params['watermark']}, must be at least 0, below 1"]


register("watermark", admit=admit, rules=rules, params={"watermark": 0.05})
