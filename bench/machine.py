"""What every bench needs: is the machine idle, how fast is it at most, and medians of contenders that take turns."""

import statistics
import sys
import time
from collections.abc import Callable

import torch

BUSY_US = 100.0


def empty_region_us() -> float:
    """Median time of the smallest operator that uses all threads; far above 20 us means that others use the cores."""
    x = torch.ones(1 << 16)
    times = []
    for _ in range(300):
        a = time.perf_counter()
        x.add_(0.0)
        times.append(time.perf_counter() - a)
    return statistics.median(times) * 1e6


def require_idle(argv: list[str] | None = None) -> None:
    """Exit with status 3 and a sentence if the machine is busy; --busy-ok measures all the same, off the record."""
    found = min(empty_region_us() for _ in range(3))
    if found > BUSY_US:
        print(
            f"machine busy: an empty parallel region takes {found:.0f} us (limit {BUSY_US:.0f}); nothing was measured",
            file=sys.stderr,
        )
        if "--busy-ok" not in (argv or sys.argv):
            raise SystemExit(3)
    print(f"empty {torch.get_num_threads()}-thread region {found:.1f} us")


def read_bandwidth() -> float:
    """Bytes per second of summing 256 MiB."""
    x = torch.ones(64 << 20)
    return x.nbytes / min(_time(x.sum) for _ in range(5))


def interleaved(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median over `rounds` of each contender's own figure, the contenders taking turns."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for fn in contenders.values():
        fn()
    for _ in range(rounds):
        for name, fn in contenders.items():
            seen[name].append(fn())
    return {name: statistics.median(v) for name, v in seen.items()}


def _time(fn: Callable[[], object]) -> float:
    a = time.perf_counter()
    fn()
    return time.perf_counter() - a


def median_us(fn: Callable[[], object], n: int = 200, warm: int = 20) -> float:
    """Median microseconds of a call."""
    for _ in range(warm):
        fn()
    return statistics.median(_time(fn) for _ in range(n)) * 1e6
