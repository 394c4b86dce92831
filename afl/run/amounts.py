"""Bytes and durations as people read them."""


def size(n: float) -> str:
    """Bytes for people.

    >>> size(3 << 20), size(999)
    ('3.0 MiB', '999 B')
    """
    n = int(n)
    step = min(4, max(0, n.bit_length() - 1) // 10)
    return f"{n} B" if step == 0 else f"{n / (1 << 10 * step):.1f} {('KiB', 'MiB', 'GiB', 'TiB')[step - 1]}"


def seconds(x: float) -> str:
    """A duration for people.

    >>> seconds(0.01234), seconds(2.5e-5)
    ('12.3 ms', '25 us')
    """
    return f"{x:.2f} s" if x >= 1 else f"{x * 1e3:.1f} ms" if x >= 1e-3 else f"{x * 1e6:.0f} us"
