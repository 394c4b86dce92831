"""Log-probabilities of sampled tokens, of the model's own distribution: before edits, temperature and filters."""

import attrs
from torch import Tensor


@attrs.frozen
class TokenLogprobs:
    """One sampled token: its log-probability and rank (1 = likeliest), and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def top_logprobs(logits: Tensor, token: Tensor, n: int) -> list[TokenLogprobs]:
    """One entry per row of logits f32 [r, v] for the sampled ids i32 [r]; n alternatives, -1 = the whole vocabulary.

    rank = number of tokens at least as likely.  Equals keep the order of their ids.
    """
    lp = logits.double().log_softmax(-1)
    own = lp.gather(1, token.long()[:, None])
    rank = (lp >= own).sum(-1)
    n = lp.shape[1] if n < 0 else min(n, lp.shape[1])
    top = lp.sort(dim=-1, descending=True, stable=True) if n else None
    out = []
    for i in range(len(lp)):
        best = () if top is None else tuple(zip(top.indices[i, :n].tolist(), top.values[i, :n].tolist(), strict=True))
        out.append(TokenLogprobs(int(token[i]), float(own[i, 0]), int(rank[i]), best))
    return out
