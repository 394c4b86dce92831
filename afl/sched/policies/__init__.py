"""Scheduler policies, one file each.  A file calls `register` when it is imported; files are listed, not imported."""

from afl.sched.policies.registry import get, load, names, register

__all__ = ["get", "load", "names", "register"]
