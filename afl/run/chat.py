"""Chat templates: messages to the text that a model was trained on.

Templates are programs from untrusted files.  They run in `chat_worker`, a separate process with limits on time,
memory and output; one process serves all renderings and is replaced after a template that overran.
"""

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from afl.errors import CheckpointError, RequestError
from afl.models.checkpoint import Checkpoint
from afl.run.text import Tokenizer

_START_SECONDS = 30.0   # an interpreter on a busy machine


@attrs.frozen
class Limits:
    """What one rendering may use."""

    seconds: float = 2.0
    output: int = 8 << 20       # characters
    memory: int = 512 << 20     # address space of the worker


class ChatTemplates:
    """The templates of a checkpoint, by name, and the special tokens that they may mention."""

    def __init__(self, templates: Mapping[str, str], tokens: Mapping[str, str], limits: Limits | None = None) -> None:
        self.templates, self.tokens, self.limits = dict(templates), dict(tokens), limits or Limits()
        self._worker: _Worker | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, limits: Limits | None = None) -> "ChatTemplates | None":
        """None when the checkpoint has no template: then a prompt is plain text."""
        found = checkpoint.chat_templates
        return cls(found, checkpoint.special_tokens, limits) if found else None

    def choose(self, *, tools: bool) -> str:
        """The template to use: "tool_use" when tools are given and it exists, else "default", else the only one."""
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        if len(self.templates) == 1:
            return next(iter(self.templates.values()))
        raise CheckpointError(f"no chat template is the default one; there are {', '.join(sorted(self.templates))}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        now: datetime,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text for `messages`, each {"role", "content", ...}.  `now` is what templates see as the date.

        `variables` are further names that the template may ask for, such as enable_thinking.
        Raises RequestError when the template refuses the messages, CheckpointError when the template is at fault.
        """
        job = {
            "template": self.choose(tools=bool(tools)),
            "now": now.isoformat(),
            "variables": {
                **self.tokens, "messages": list(messages), "tools": list(tools) if tools else None, "documents": None,
                "add_generation_prompt": add_generation_prompt, **(variables or {}),
            },
        }
        if self._worker is None:
            self._worker = _Worker(self.limits)
        try:
            answer = self._worker.ask(json.dumps(job), self.limits)
        except CheckpointError:
            self.close()
            raise
        if "refused" in answer:
            raise RequestError(f"the chat template refuses these messages: {answer['refused']}")
        if "error" in answer:
            raise CheckpointError(f"the chat template failed: {answer['error']}")
        return answer["text"]

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
        """Token ids of the rendered messages.  No special tokens are added: the template wrote them."""
        return tokenizer.encode(self.render(messages, **how), special=False)

    def close(self) -> None:
        """End the worker process, if one runs; the next rendering starts another."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


@attrs.frozen(eq=False)
class Text:
    """The text layer of a checkpoint: its tokenizer, and its chat templates if it has any."""

    tokenizer: Tokenizer
    chat: ChatTemplates | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Text":
        """Raises CheckpointError when the checkpoint has no tokenizer or one that cannot be used."""
        return cls(Tokenizer.from_checkpoint(checkpoint), ChatTemplates.from_checkpoint(checkpoint))


class _Worker:
    """A running chat_worker."""

    def __init__(self, limits: Limits) -> None:
        told = attrs.asdict(limits) | {"path": [p for p in sys.path if p]}
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("chat_worker.py")), json.dumps(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, cwd="/",
        )
        self.close = weakref.finalize(self, _end, self.process)     # also at exit
        self._read(_START_SECONDS, 1 << 10)

    def ask(self, line: str, limits: Limits) -> dict[str, Any]:
        """Send one job and wait for its answer.  Raises CheckpointError when the limits are overrun."""
        assert self.process.stdin is not None
        rest = memoryview(line.encode() + b"\n")
        try:
            while rest:
                rest = rest[self.process.stdin.write(rest) or 0 :]
        except BrokenPipeError:
            raise CheckpointError("the process that renders chat templates has ended") from None
        return self._read(limits.seconds, 6 * limits.output + 4096)     # JSON escapes take up to 6 bytes each

    def _read(self, seconds: float, most: int) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline, parts, size = time.monotonic() + seconds, [], 0
        while not (parts and parts[-1].endswith(b"\n")):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise CheckpointError(f"the chat template did not finish within {seconds:g} s")
            parts.append(os.read(self.process.stdout.fileno(), 1 << 20))
            size += len(parts[-1])
            if not parts[-1] or size > most:
                raise CheckpointError("the chat template ended its renderer, or its output has no end")
        return json.loads(b"".join(parts))


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
