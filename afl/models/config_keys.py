"""Reading numbers out of a checkpoint's config.json, which is untrusted: all that is wrong is reported at once."""

import difflib
from collections.abc import Mapping
from typing import Any

from afl.errors import ConfigError, violations

ALIKE = 0.88        # so similar to a key that is read, an unread key is a misspelling of it
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")       # `rope_config` reads these


class Keys:
    """Collects typed values from a config dict; `done` raises one error with all problems.

    A key that nothing reads is no error, since config.json holds much that does not concern the result, unless it
    looks like one that is read: then it is a misspelling, and the default would be taken in silence.
    """

    def __init__(self, j: Mapping[str, Any], model: str) -> None:
        self.j, self.model, self.problems = j, model, []
        self.read: set[str] = set(ROPE)

    def size(self, key: str, default: int | None = None, high: int = 1 << 24) -> int:
        """A positive integer up to `high`."""
        self.read.add(key)
        value = self.j.get(key)
        if value is None:
            value = default
        if value is None:
            self.problems.append(f"{key} is missing")
        elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            self.problems.append(f"{key} must be an integer from 1 to {high}, is {value!r:.80}")
        else:
            return value
        return 1

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        self.read.add(key)
        value = self.j.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.problems.append(f"{key} must be a positive number, is {value!r:.80}")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; null means the default."""
        self.read.add(key)
        value = self.j.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{key} must be true or false, is {value!r:.80}")
            return default
        return value

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """A key whose other values this model does not compute."""
        self.read.add(key)
        if key in self.j and self.j[key] not in allowed:
            self.problems.append(f"{key} is {self.j[key]!r:.80}; {why}")

    def require(self, holds: bool, text: str) -> None:
        """A relation between values."""
        if not holds and not self.problems:
            self.problems.append(text)

    def done(self) -> None:
        """Raise ConfigError if anything was wrong."""
        for key in sorted(self.j.keys() - self.read, key=str)[:1000]:
            near = difflib.get_close_matches(str(key)[:60], self.read - self.j.keys(), 1, ALIKE)
            self.problems += [f"unknown key {str(key)[:60]!r}; did you mean {near[0]!r}?"] if near else []
        if self.problems:
            raise ConfigError(violations(f"config.json of {self.model} does not hold", [f"{p}" for p in self.problems]))
