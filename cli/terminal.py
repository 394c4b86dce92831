"""What reaches the terminal: escaped text, messages on stderr, Ctrl-C that waits for a good moment.

Text of models and checkpoints is untrusted.  On a terminal, characters that drive it are shown as escapes such as
`\\x1b`; a pipe or file gets the text unchanged, since a program that reads it wants the bytes.
"""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

# C0 but tab and newline, DEL, C1, line and paragraph separators, direction marks, embeddings, overrides and isolates,
# tag characters, and half characters; joiners stay, since emoji and several scripts need them
_DRIVING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)


def escaped(text: str) -> str:
    """The text with every character that could drive a terminal spelled out.

    >>> print(escaped("a\\x1b[2Jb"))
    a\\x1b[2Jb
    """
    return _DRIVING.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def write(text: str, file: IO[str] | None = None) -> None:
    """Text of a model or checkpoint on stdout (or `file`): escaped on a terminal, unchanged elsewhere; flushed."""
    out = file or sys.stdout
    code = getattr(out, "encoding", None) or "utf-8"
    out.write((escaped(text) if out.isatty() else text).encode(code, "replace").decode(code))
    out.flush()


def say(text: str, kind: str = "") -> None:
    """A message for the user on stderr; always escaped, since it may quote a file."""
    head = f"afl: {kind}: " if kind else ""
    print(head + escaped(text), file=sys.stderr, flush=True)


class Interrupts:
    """Whether Ctrl-C was pressed while `waiting` was entered.  The second press does not wait."""

    def __init__(self) -> None:
        self.pressed = False

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    @contextmanager
    def waiting(self) -> Iterator["Interrupts"]:
        """The first Ctrl-C inside only sets `pressed`; the caller looks at it where stopping is clean."""
        try:
            before = signal.signal(signal.SIGINT, self._press)
        except ValueError:  # not the main thread: Ctrl-C goes elsewhere
            yield self
            return
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner while something of unknown length goes on; nothing is shown when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(escaped(what))):
        yield


@contextmanager
def loading(what: str) -> Iterator[Any]:
    """A progress callback (bytes done, bytes in all); None, and nothing shown, when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escaped(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def scoring() -> Iterator[Any]:
    """A progress callback (tokens done, tokens in all); None, and nothing shown, when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counting(total: int) -> Iterator[Any]:
    """A callback that counts finished answers; shown when stderr is a terminal and stdout is not."""
    if total < 2 or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
