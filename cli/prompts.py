"""What the user wants answered: an argument, standard input, a file of prompts, or token ids."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from afl.errors import BadInput, RequestError, nearest, violations

TEACH = """there is no prompt. Give one in any of these ways:
  afl run "What is the capital of France?"
  echo "What is the capital of France?" | afl run
  afl run --file prompts.txt            one prompt per line, or JSON lines with "prompt" or "messages"
  afl run --prompt-ids 1,4308,198       token ids"""
_KEYS = ("prompt", "messages")
_URGENCY = ("priority", "deadline")
_MOST = 20      # violations spelled out


@attrs.frozen
class Asked:
    """One prompt and where it came from: text, token ids, or chat messages; or why it cannot be used."""

    where: str
    value: Any
    error: str | None = None
    urgency: dict[str, Any] = attrs.field(factory=dict)     # "priority", "deadline", of those that were given


def gather(prompt: str | None, file: str | None, ids: str | None) -> list[Asked]:
    """The prompts of one run.  Raises BadInput for none, for more than one source, for an unreadable file."""
    given = [name for name, value in (("PROMPT", prompt), ("--file", file), ("--prompt-ids", ids)) if value is not None]
    if len(given) > 1:
        raise BadInput(f"{' and '.join(given)} were given; each is a prompt of its own, use one of them")
    if ids is not None:
        return [_checked(Asked("--prompt-ids", numbers(ids, "--prompt-ids")))]
    if file is not None:
        return from_lines(_read(file), file)
    if prompt is not None and prompt != "-":
        return [_checked(Asked("PROMPT", prompt))]
    if prompt is None and sys.stdin.isatty():
        raise BadInput(TEACH)
    text = _read("-")
    if prompt is None and not text:
        raise BadInput(TEACH)       # started by a program that gave no input
    return [_checked(Asked("standard input", text.removesuffix("\n")))]


def from_lines(text: str, name: str) -> list[Asked]:
    """One prompt per line that is not blank; JSON lines if the name says so or the first line is such an object."""
    lines = [(f"{name}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise BadInput(f"{name} holds no prompt: write one per line, or JSON lines with one of {', '.join(_KEYS)}")
    if Path(name).suffix not in (".jsonl", ".ndjson") and not _is_record(lines[0][1]):
        return [Asked(where, line.removesuffix("\r")) for where, line in lines]
    return [_record(where, line) for where, line in lines]


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers between commas or blanks."""
    words = text.replace(",", " ").split()
    bad = [w for w in words if not w.lstrip("-").isascii() or not w.lstrip("-").isdigit() or len(w) > 18]
    if bad:
        got = ", ".join(map(repr, bad[:5]))
        raise BadInput(f"{option} takes whole numbers between commas, such as 1,2,3; got {got}")
    return [int(w) for w in words]


def refusals(asked: Iterable[Asked]) -> str:
    """One message about every prompt that cannot be used."""
    rows = [f"{a.where}: {a.error}" for a in asked if a.error is not None]
    more = [f"... {len(rows) - _MOST} more"] if len(rows) > _MOST else []
    return violations("prompts that cannot be used", [*rows[:_MOST], *more])


def _checked(asked: Asked) -> Asked:
    if not asked.value:
        raise RequestError(f"{asked.where}: the prompt is empty: a model continues at least one token")
    return asked


def _read(name: str) -> str:
    """Text of a file, or of standard input for "-"."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except (OSError, ValueError) as e:
        raise BadInput(f"cannot read {name}: {getattr(e, 'strerror', None) or e}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        what = "standard input" if name == "-" else name
        raise BadInput(f"{what} is not UTF-8 text: byte {raw[e.start]:#04x} at {e.start}") from None


def _is_record(line: str) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and any(k in found for k in _KEYS)


def _record(where: str, line: str) -> Asked:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as e:
        return Asked(where, None, f"not JSON: {e}")
    if not isinstance(found, dict) or sum(k in found for k in _KEYS) != 1:
        return Asked(where, None, "expected an object with one of \"prompt\" and \"messages\"")
    other = [k for k in found if k not in _KEYS + _URGENCY]
    if other:
        near = nearest(other[0], _KEYS + _URGENCY, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "; sampling options are flags of afl run"
        return Asked(where, None, f"key {other[0]!r} is not known{hint}")
    urgency = {k: found[k] for k in _URGENCY if k in found}
    if type(urgency.get("priority", 0)) is not int or abs(urgency.get("priority", 0)) >= 1 << 62:
        return Asked(where, None, f"\"priority\" must be a whole number, the smaller the sooner; got "
                                  f"{found['priority']!r:.40}")
    due = urgency.get("deadline", 0.0)
    if type(due) not in (int, float) or not 0 <= due <= 1e9:
        return Asked(where, None, f"\"deadline\" must be seconds until the first token is due; got {due!r:.40}")
    if "messages" in found:
        bad = _bad_messages(found["messages"])
        return Asked(where, None if bad else found["messages"], bad, urgency)
    value = found["prompt"]
    if isinstance(value, str) or (isinstance(value, list) and all(type(i) is int for i in value)):
        return Asked(where, value, None, urgency)
    return Asked(where, None, "\"prompt\" must be a text or a list of token ids")


def _bad_messages(found: Any) -> str | None:
    if not isinstance(found, list) or not found:
        return "\"messages\" must be a list of {\"role\", \"content\"} objects with at least one entry"
    for i, m in enumerate(found):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or "content" not in m:
            return f"message {i} must be an object with \"role\" and \"content\""
    return None
