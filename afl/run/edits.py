"""The edits of one row's logits: banned tokens, minimum length, bias, penalties, kept up to date token by token.

Order, as everywhere in the field: bad words, minimum length, bias, then repetition, frequency and presence penalty.
"""

from typing import Any

import numpy as np


class RowEdits:
    """Sparse table of one row: an entry per token id that anything touches; never two for one id."""

    def __init__(self, params: Any, prompt_tokens: int, stop_ids: tuple[int, ...]) -> None:
        self.p, self.prompt_tokens, self.stop_ids = params, prompt_tokens, np.array(sorted(set(stop_ids)), np.int64)
        self.seen = 0                                  # tokens of the row that are accounted for
        self.place: dict[int, int] = {}                # token id -> entry
        self.ids = np.empty(64, np.int32)
        self.count = np.zeros(64, np.int32)            # among the outputs
        self.met = np.zeros(64, bool)                  # in prompt or outputs
        self.bias = np.zeros(64, np.float32)
        for id, b in params.logit_bias.items():
            self.bias[self._entry(int(id))] = b
        for word in params.bad_words_ids:
            if len(word) == 1:
                self.bias[self._entry(word[0])] = -np.inf

    def now(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(ids i32, bias, repeat, minus f32) for the token after `tokens`, the row's prompt and outputs so far."""
        p, outputs = self.p, tokens[self.prompt_tokens :]
        if p.penalised and len(tokens) > self.seen:
            self._account(tokens)
        banned = [w[-1] for w in p.bad_words_ids if len(w) > 1 and _ends_with(outputs, w[:-1])]
        if len(outputs) < p.min_tokens:
            banned += self.stop_ids.tolist()
        places = [self._entry(id) for id in banned]
        n = len(self.place)
        bias = self.bias[:n].copy()
        bias[places] = -np.inf
        repeat = np.where(self.met[:n], np.float32(p.repetition_penalty), np.float32(1))
        count = self.count[:n]
        minus = (np.float32(p.frequency_penalty) * count + np.float32(p.presence_penalty) * (count > 0)).astype(np.float32)
        return self.ids[:n].copy(), bias, repeat, minus

    def _account(self, tokens: np.ndarray) -> None:
        """Count what is new, one look-up per distinct token."""
        new, first_output = tokens[self.seen :], max(self.prompt_tokens - self.seen, 0)
        for part, is_output in ((new[:first_output], 0), (new[first_output:], 1)):
            ids, times = np.unique(part, return_counts=True)
            for id, k in zip(ids.tolist(), times.tolist(), strict=True):
                at = self._entry(id)
                self.met[at] = True
                self.count[at] += k * is_output
        self.seen = len(tokens)

    def _entry(self, id: int) -> int:
        at = self.place.get(id)
        if at is None:
            at = self.place[id] = len(self.place)
            if at == len(self.ids):
                for name in ("ids", "count", "met", "bias"):
                    old = getattr(self, name)
                    setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
            self.ids[at] = id
        return at


def _ends_with(outputs: np.ndarray, word: tuple[int, ...]) -> bool:
    return len(outputs) >= len(word) and outputs[len(outputs) - len(word) :].tolist() == list(word)
