"""Which weight schemes let an expert travel, as data: what moves per expert and how many bytes, or why it cannot.

An expert can be moved if every tensor that its kernel reads has the expert as leading dimension and can be copied byte
by byte.  A scheme whose packing mixes experts, or hides part of what the kernel reads, is refused before anything runs.
"""

from typing import NamedTuple

from afl.errors import ConfigError, unknown, violations


class Piece(NamedTuple):
    """A tensor of one expert: elements per hidden size d and feed-forward size f, and bits of an element."""

    name: str
    bits: int
    df: int = 0                         # elements per d * f
    d: int = 0                          # per d
    f: int = 0                          # per f
    group: int = 1                      # d and f elements that share one


class Scheme(NamedTuple):
    """How expert weights are stored.  `why_not`: the reason that they cannot be moved one by one, empty if they can."""

    name: str
    pieces: tuple[Piece, ...] = ()
    why_not: str = ""


def _weights(bits: int) -> tuple[Piece, ...]:
    return Piece("w13", bits, df=2), Piece("w2", bits, df=1)


_SCALES = Piece("w13_scale", 32, f=2), Piece("w2_scale", 32, d=1)
_BIASES = Piece("w13_scale_bias", 32, f=2), Piece("w2_scale_bias", 32, d=1)
_MX = Piece("w13_scale", 8, df=2, group=32), Piece("w2_scale", 8, df=1, group=32)

SCHEMES: dict[str, Scheme] = {s.name: s for s in (
    Scheme("none", _weights(16)),
    Scheme("w8a8_dynamic", _weights(8) + _SCALES),
    Scheme("w4a8_dynamic", _weights(4) + _SCALES + _BIASES),
    Scheme("w8a8_mxfp8", _weights(8) + _MX),
    Scheme("w4a4_mxfp4", _weights(4) + _MX),
    Scheme("w4a8_mxfp", why_not="its kernel takes weights of all experts in one tensor without a layout per expert"),
    Scheme("w4a16", why_not="its kernel wants scales and offsets in a layout that does not show one expert's part"),
    Scheme("w4a16_mxfp4", why_not="its kernel wants scales in a layout that does not show one expert's part"),
    Scheme("w4a4_flatquant", why_not="all experts of a rank are packed into one tensor, eight 4-bit weights to an "
           "int32, and share transform matrices: there is no part of it that is one expert"),
)}


def refusals(scheme: str, *, lora: bool = False) -> list[str]:
    """Why experts stored like this cannot be moved while serving; empty if they can.

    >>> refusals("w8a8_dynamic"), len(refusals("w4a4_flatquant", lora=True))
    ([], 2)
    """
    if scheme not in SCHEMES:
        raise ConfigError(unknown("weight scheme", scheme, SCHEMES))
    found = SCHEMES[scheme]
    bad = [f"weight scheme {scheme}: {found.why_not}; use one of {', '.join(movable())}, or static placement"
           ] if found.why_not else []
    if lora:
        bad.append("adapters on experts: they belong to an expert and would have to travel with it; merge them first")
    return bad


def require_movable(scheme: str, *, lora: bool = False) -> None:
    """Raise `ConfigError` with every reason in `refusals`."""
    bad = refusals(scheme, lora=lora)
    if bad:
        raise ConfigError(violations("experts cannot be moved", bad))


def movable() -> list[str]:
    """The schemes whose experts can be moved."""
    return sorted(n for n, s in SCHEMES.items() if not s.why_not)


def expert_bytes(scheme: str, d: int, f: int) -> int:
    """Bytes that travel with one expert of hidden size d and feed-forward size f; `ConfigError` if it cannot.

    >>> expert_bytes("none", 7168, 2048), expert_bytes("w8a8_dynamic", 7168, 2048)
    (88080384, 44085248)
    """
    require_movable(scheme)
    return sum(p.bits * (-(-p.df * d * f // p.group) + -(-p.d * d // p.group) + -(-p.f * f // p.group)) // 8
               for p in SCHEMES[scheme].pieces)
