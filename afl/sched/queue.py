"""A persistent heap of (key, number, id): the waiting requests, and the alarms of those that expire.

A leftist heap of tuples: push and pop make O(log n) new nodes and share the rest.  Nothing is removed from the middle:
a request's ticket names the entry that counts, dead entries are skipped at the top and swept when they outnumber the
live ones.
"""

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from afl.sched.policy import Policy

Entry = tuple[Any, int, str]                       # (key, arrival number, request id); the number makes it unique
Node = tuple[int, Entry, Any, Any]                 # (rank, entry, left, right); None is empty


@attrs.frozen(eq=False)
class Queue:
    """Entries, smallest first; `policy` made the keys."""

    policy: Policy = Policy()
    node: Node | None = None
    size: int = 0                                  # entries, dead ones included

    def push(self, entry: Entry) -> "Queue":
        """The queue with one entry more."""
        return Queue(self.policy, _merge((1, entry, None, None), self.node), self.size + 1)

    def head(self) -> Entry | None:
        """The first entry, dead or live."""
        return self.node[1] if self.node else None

    def pop(self) -> "Queue":
        """The queue without its first entry."""
        assert self.node
        return Queue(self.policy, _merge(self.node[2], self.node[3]), self.size - 1)

    def entries(self) -> list[Entry]:
        """Every entry, in order; O(n log n)."""
        out, todo = [], [self.node]
        while todo:
            node = todo.pop()
            if node:
                out.append(node[1])
                todo += node[2:]
        return sorted(out)

    def __reduce__(self) -> tuple:
        return build, (self.policy, self.entries())     # nested nodes are too deep for pickle


def build(policy: Policy, entries: Iterable[Entry]) -> Queue:
    """A queue of `entries`; a sorted list is a heap whose every right branch is empty."""
    node, n = None, 0
    for entry in sorted(entries, reverse=True):
        node, n = (1, entry, node, None), n + 1
    return Queue(policy, node, n)


def swept(queue: Queue, waiting: int, live: Callable[[Entry], bool]) -> Queue:
    """The queue without dead entries, if they outnumber the `waiting` live ones."""
    if queue.size <= 2 * waiting:
        return queue
    return build(queue.policy, filter(live, queue.entries()))


def _merge(a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None:
        return a or b
    if b[1] < a[1]:
        a, b = b, a
    left, right = a[2], _merge(a[3], b)
    if left is None or left[0] < right[0]:         # type: ignore[index]  # a merge with b is not empty
        left, right = right, left
    return (right[0] + 1 if right else 1, a[1], left, right)
