"""The work of one step, as a value: everything the packing side needs, and nothing it could derive."""

import attrs
import numpy as np


@attrs.frozen(eq=False)
class Load:
    """Blocks of a request that are to be filled from elsewhere: tokens [start, stop); the driver answers `Loaded`."""

    id: str
    row: int
    start: int
    stop: int
    blocks: tuple[np.ndarray, ...]     # int32 [blocks] per cache group, 0 where none is held


@attrs.frozen(eq=False)
class Copies:
    """Block contents to move before the step runs: device block device[i] from or to host block host[i]."""

    device: np.ndarray        # int32 [blocks]
    host: np.ndarray          # int32 [blocks]


NO_COPIES = Copies(np.zeros(0, np.int32), np.zeros(0, np.int32))


@attrs.frozen(eq=False)
class Plan:
    """Which rows compute which tokens in step `step`, in batch order.

    A plan without rows only carries loads or copies; it has no result.  With speculation the last `drafts` tokens of a
    grant are draft tokens, and `start` assumes that all drafts in flight are accepted: the device subtracts those that
    it knows to be rejected.
    """

    step: int
    rows: np.ndarray          # int32 [r] device rows, no row twice
    ids: np.ndarray           # object [r] request ids
    start: np.ndarray         # int32 [r] tokens already computed = position of the first token of the grant
    grant: np.ndarray         # int32 [r] tokens to compute, each >= 1, drafts included
    emit: np.ndarray          # bool [r] the grant reaches the row's last token, so the row samples
    drafts: np.ndarray        # int32 [r]
    blocks: tuple[np.ndarray, ...]     # int32 [r, w] per cache group, 0 behind a row's last block
    at: np.ndarray            # intp [r] `rows` again, as numpy likes indices
    tokens: int               # sum of the grants
    needs_host: bool = False  # a row samples under host state (a grammar mask) that must be ready first
    loads: tuple[Load, ...] = ()
    out: Copies = NO_COPIES   # device to host, first
    back: Copies = NO_COPIES  # host to device, second

    @property
    def kv_len(self) -> np.ndarray:
        """Tokens in the cache of each row once the step has run: int32 [r]."""
        return self.start + self.grant

    def __repr__(self) -> str:
        rows = [f"{i}:{n}{'' if e else '+'}" for i, n, e in zip(self.ids, self.grant, self.emit, strict=True)]
        more = f" and {len(rows) - 12} more" if len(rows) > 12 else ""
        return f"Plan(step {self.step}, {self.tokens} tokens: {', '.join(rows[:12])}{more})"
