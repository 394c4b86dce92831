"""Scheduler policies, one file each.  A file calls `register` when it is imported; files are listed, not imported."""

from afl.sched.policies.registry import compose, get, load, names, needs, register

__all__ = ["compose", "get", "load", "names", "needs", "register"]
