"""Log-probabilities of sampled tokens, of the model's own distribution: before edits, temperature and filters."""

import attrs
import numpy as np
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

    l - max - log(sum(exp(l - max))) in float64.  rank = number of tokens at least as likely.  The sampled token may be
    among the alternatives; equals come in the order of their ids.
    """
    return [_of_row(x, i, n) for x, i in zip(logits.numpy(), token.tolist(), strict=True)]


def _of_row(x: np.ndarray, token: int, n: int) -> TokenLogprobs:
    z = x - np.float64(x.max())
    z -= np.log(np.exp(z).sum())
    best = _largest(x, len(x) if n < 0 else min(n, len(x)))
    top = tuple(zip(best.tolist(), z[best].tolist(), strict=True))
    return TokenLogprobs(token, float(z[token]), int(np.count_nonzero(x >= x[token])), top)


def _largest(x: np.ndarray, n: int) -> np.ndarray:
    """Ids of the n largest, largest first, the lower id first among equals."""
    v = len(x)
    ids = np.arange(v) if n == v else np.flatnonzero(x >= np.partition(x, v - n)[v - n]) if n else np.arange(0)
    return ids[np.argsort(-x[ids], kind="stable")[:n]]
