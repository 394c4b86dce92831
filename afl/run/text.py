"""Text to token ids and back: `Tokenizer`, the incremental `Detokenizer`, and `TextStream` with stop strings.

Streaming shows exactly the text that decoding everything at once would give; each class keeps only the short tail
that later tokens can still change, so a token costs the same at any length.
"""

from collections.abc import Sequence

import tokenizers

from afl.errors import CheckpointError, RequestError
from afl.models.checkpoint import Checkpoint

MAX_TOKENIZER = 64 << 20    # the largest tokenizer.json in use are near 35 MB
_BAD = "\ufffd"             # what an incomplete or invalid UTF-8 sequence decodes to
_PATIENCE = 8               # tokens to wait for the end of a character; four bytes need at most four


class Tokenizer:
    """A tokenizer.json, with the ids that end an answer.

    eos_ids is the union of what config, generation config and the tokenizer itself name.
    """

    def __init__(self, text: str | bytes, *, eos_ids: Sequence[int] = (), special_tokens: dict[str, str] | None = None):
        if len(text) > MAX_TOKENIZER:
            raise CheckpointError(f"tokenizer.json has {len(text)} bytes; at most {MAX_TOKENIZER} are read")
        self.inner = _parse(text)
        self.special_tokens = dict(special_tokens or {})
        added = self.inner.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, t in added.items() if t.special)
        self.bos_id = self._id_of("bos_token")
        own = self._id_of("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *([] if own is None else [own])]))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """The tokenizer of a checkpoint.  Raises CheckpointError when it has none."""
        if checkpoint.tokenizer_json is None:
            raise CheckpointError(
                f"{checkpoint.path} has no tokenizer.json; make one with transformers "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...)), or give token ids"
            )
        text = checkpoint.tokenizer_json()
        return cls(text, eos_ids=checkpoint.eos_ids, special_tokens=checkpoint.special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text, added tokens included."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids.  `special` adds what the tokenizer puts around a text (BOS); a rendered chat has it already."""
        try:
            return self.inner.encode(text, add_special_tokens=special).ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError("the prompt is not valid Unicode text") from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; ids without a text count as empty."""
        return self.inner.decode(list(ids), skip_special_tokens=skip_special)

    def _id_of(self, kind: str) -> int | None:
        text = self.special_tokens.get(kind)
        return None if text is None else self.inner.token_to_id(text)


def _parse(text: str | bytes) -> tokenizers.Tokenizer:
    try:
        inner = tokenizers.Tokenizer.from_str(text if isinstance(text, str) else text.decode("utf-8"))
    except BaseException as e:  # a panic inside the package is not an Exception
        if isinstance(e, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"tokenizer.json cannot be used: {str(e)[:300]}") from None
    inner.no_truncation()       # settings of somebody's training run
    inner.no_padding()
    return inner


class Detokenizer:
    """Token ids to text, piece by piece.

    A decoder may join a token with the ones before it, so the tail `ids` is decoded again with each piece: `shown`
    characters of its text are out already.  After each finished piece the tail shrinks to the last piece.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._decode = tokenizer.inner.decode
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._ids: list[int] = []
        self._read = 0      # ids[:read] have been shown
        self._shown = 0     # characters of the tail's text that have been shown

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become final with these tokens."""
        # one by one: a run of byte tokens decodes to text only where it stops at the end of a character
        return "".join([self._take([i], final=False) for i in ids if i not in self._skip])

    def push_special(self, token: int) -> str:
        """The text of one token even if it is special; for a stop token that the request wants to see."""
        return self._take([token], final=False)

    def end(self) -> str:
        """What was held back: a character that was never finished."""
        return self._take([], final=True)

    def _take(self, ids: Sequence[int], *, final: bool) -> str:
        self._ids += ids
        text = self._decode(self._ids, skip_special_tokens=False)
        if text.endswith(_BAD) and not final:
            if len(self._ids) - self._read <= _PATIENCE:
                return ""
            # invalid bytes without end: only the last mark can still become a character
            new, self._shown = text[self._shown : -1], len(text) - 1
            if len(self._ids) > 4 * _PATIENCE:
                self._ids = self._ids[-_PATIENCE:]
                self._shown = len(self._decode(self._ids, skip_special_tokens=False)) - 1
                self._read = 0
            return new
        new = text[self._shown :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = len(self._decode(self._ids, skip_special_tokens=False))
        return new


class StopStrings:
    """Cuts text at the first stop string, wherever pieces begin and end.

    The match that is complete first wins, the longest of those; so cutting does not depend on how text is cut into
    pieces.  Held back is only what can still become a stop string: fewer characters than the longest one has.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        if not all(stop):
            raise RequestError("a stop string must not be empty")
        self._stop, self._include = tuple(stop), include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is safe to show."""
        if self.matched is not None or not self._stop:
            return "" if self._stop else text
        text = self._held + text
        hits = [(text.find(s) + len(s), -len(s), s) for s in self._stop if s in text]
        if hits:
            end, _, self.matched = min(hits)
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """The text of one request: detokenised, cut at stop strings, safe to print as it comes.

    include_stop shows the stop token or stop string itself.  The first min_tokens tokens cannot complete a stop
    string.  After `push` look at `stopped`; at the end call `end` once.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special: bool = True, include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._strings = StopStrings(stop, include=include_stop)
        self._include, self._free = include_stop, min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._strings.matched

    def push(self, ids: Sequence[int]) -> str:
        """New text.  Stop tokens do not go in here; give them to `end`."""
        free = min(self._free, len(ids))
        self._free -= free
        text = self._detokenizer.push(ids[:free]) if free else ""
        return text + self._strings.push(self._detokenizer.push(ids[free:])) if len(ids) > free else text

    def end(self, stop_id: int | None = None) -> str:
        """The rest, with the text of the stop token that ended the request when include_stop says so."""
        if self.stopped is not None:
            return ""
        shown = self._include and stop_id is not None
        text = self._detokenizer.push_special(stop_id) if shown and stop_id is not None else ""
        rest = self._strings.push(text + self._detokenizer.end())
        return rest + self._strings.end()
