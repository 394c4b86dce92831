"""The work of one step, as a value: everything the packing side needs, and nothing it could derive."""

import attrs
import numpy as np


@attrs.frozen(eq=False)
class Plan:
    """Which rows compute which tokens in step `step`, in batch order."""

    step: int
    rows: np.ndarray          # int32 [r] device rows, no row twice
    ids: np.ndarray           # object [r] request ids
    start: np.ndarray         # int32 [r] tokens already computed = position of the first token of the grant
    grant: np.ndarray         # int32 [r] tokens to compute, each >= 1
    emit: np.ndarray          # bool [r] the grant reaches the row's last token, so the row samples
    blocks: np.ndarray        # int32 [r, w] block tables, 0 behind a row's last block
    at: np.ndarray            # intp [r] `rows` again, as numpy likes indices
    tokens: int               # sum of the grants
    needs_host: bool = False  # a row samples under host state (a grammar mask) that must be ready first

    @property
    def kv_len(self) -> np.ndarray:
        """Tokens in the cache of each row once the step has run: int32 [r]."""
        return self.start + self.grant

    def __repr__(self) -> str:
        rows = [f"{i}:{n}{'' if e else '+'}" for i, n, e in zip(self.ids, self.grant, self.emit, strict=True)]
        more = f" and {len(rows) - 12} more" if len(rows) > 12 else ""
        return f"Plan(step {self.step}, {self.tokens} tokens: {', '.join(rows[:12])}{more})"
