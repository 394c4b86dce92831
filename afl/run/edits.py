"""The edits of one row's logits: banned tokens, minimum length, bias, penalties, kept up to date token by token.

Order, as everywhere in the field: bad words, minimum length, bias, then repetition, frequency and presence penalty.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

_NEUTRAL = {"ids": 0, "count": 0, "bias": 0, "repeat": 1, "minus": 0}


class RowEdits:
    """Sparse table of one row: an entry per token id that anything touches; never two for one id.

    count is the number of times among the outputs.  A step costs what is new in it, and a copy of the columns.
    """

    def __init__(self, params: Any, prompt_tokens: int, stop_ids: tuple[int, ...]) -> None:
        self.p, self.prompt_tokens, self.stop_ids = params, prompt_tokens, sorted(set(stop_ids))
        self.seen = 0                                  # tokens of the row that are accounted for
        self.place: dict[int, int] = {}                # token id -> entry
        self.ids, self.count = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.bias, self.repeat, self.minus = (np.zeros(0, np.float32) for _ in range(3))
        self.words = [w for w in params.bad_words_ids if len(w) > 1]
        biased = self._places(list(params.logit_bias))       # before the columns are named: it may replace them
        banned = self._places([w[0] for w in params.bad_words_ids if len(w) == 1])
        self.bias[biased], self.bias[banned] = list(params.logit_bias.values()), -np.inf

    def now(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(ids i32, bias, repeat, minus f32) for the token after `tokens`, the row's prompt and outputs so far."""
        outputs = tokens[self.prompt_tokens :]
        if self.p.penalised and len(tokens) > self.seen:
            self._account(tokens)
        banned = [w[-1] for w in self.words if _ends_with(outputs, w[:-1])]
        if len(outputs) < self.p.min_tokens:
            banned += self.stop_ids
        places = self._places(banned)
        n = len(self.place)
        bias = self.bias[:n].copy()
        bias[places] = -np.inf
        return self.ids[:n].copy(), bias, self.repeat[:n].copy(), self.minus[:n].copy()

    def _account(self, tokens: np.ndarray) -> None:
        """Count what is new."""
        p, start = self.p, max(self.seen, self.prompt_tokens)
        if self.seen < self.prompt_tokens:
            at = self._places(np.unique(tokens[self.seen : start]).tolist())
            self.repeat[at] = p.repetition_penalty
        if len(tokens) == start + 1:
            ids, times = [int(tokens[start])], 1
        else:
            found, times = np.unique(tokens[start:], return_counts=True)
            ids = found.tolist()
        at = self._places(ids)
        self.count[at] += times
        self.repeat[at] = p.repetition_penalty
        self.minus[at] = p.frequency_penalty * self.count[at] + p.presence_penalty
        self.seen = len(tokens)

    def _places(self, ids: Sequence[int]) -> list[int]:
        """The entry of each id, made if there is none yet."""
        n = len(self.place)
        new = [i for i in dict.fromkeys(ids) if i not in self.place]
        self.place.update(zip(new, range(n, n + len(new)), strict=True))
        if len(self.place) > len(self.ids):
            for name, neutral in _NEUTRAL.items():
                old = getattr(self, name)
                grown = np.full(2 * len(self.place) + 16, neutral, old.dtype)
                grown[: len(old)] = old
                setattr(self, name, grown)
        self.ids[n : n + len(new)] = new
        return [self.place[i] for i in ids]


def _ends_with(outputs: np.ndarray, word: tuple[int, ...]) -> bool:
    return len(outputs) >= len(word) and outputs[len(outputs) - len(word) :].tolist() == list(word)
