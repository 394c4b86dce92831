"""Rotary frequencies from a checkpoint's config: the base, and what is done to it for longer contexts.

Old checkpoints say `rope_theta` and `rope_scaling` {"type" or "rope_type": ...}; new ones say `rope_parameters`.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs

from afl.errors import ConfigError, unknown


@attrs.frozen
class Rope:
    """inv_freq: radians per token for each channel pair.  scale: factor on cos and sin (yarn)."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


def rope_of(j: Mapping[str, Any], e: int, theta: float = 10000.0) -> Rope:
    """The rotary frequencies of a model with heads of `e` channels.

    Raises ConfigError that names the key: unknown kind, a factor that is missing or not a positive number.
    """
    given = j.get("rope_parameters")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"rope_parameters must be an object, is {given!r:.80}")
    scaling = given if given is not None else j.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_scaling must be an object or null, is {scaling!r:.80}")
    scaling = scaling or {}
    key = "rope_parameters" if given is not None else "rope_scaling"
    both = {**j, **scaling}
    base = _number(both, "rope_theta", "", theta, low=1.0)
    part = _number(both, "partial_rotary_factor", "", 1.0)
    if part > 1:
        raise ConfigError(f"partial_rotary_factor must be at most 1, is {part!r}")
    width = int(e * part)
    if width < 2 or width % 2:
        rotated = f"heads of {e} channels with partial_rotary_factor {part} rotate {width} channels"
        raise ConfigError(f"{rotated}; must be even, 2 or more")
    inv = [base ** (-2 * i / width) for i in range(width // 2)]
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{key}: {unknown('rope_type', str(kind)[:80], _KINDS)}")
    return _KINDS[kind](inv, dict(scaling), j, base, width, key)


def _number(s: Mapping[str, Any], name: str, key: str, default: float | None = None, low: float = 0.0) -> float:
    """A number above `low`."""
    value = s.get(name, default)
    where = f"{key}.{name}" if key else name
    if value is None:
        raise ConfigError(f"{where} is missing; this kind of rotary scaling needs it")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < 1e30:
        what = f"a number above {low:g}" if low else "a positive number"
        raise ConfigError(f"{where} must be {what}, is {value!r:.80}")
    return float(value)


def _default(inv: list[float], s: dict[str, Any], j: Mapping[str, Any], base: float, width: int, key: str) -> Rope:
    return Rope(tuple(inv))


def _linear(inv: list[float], s: dict[str, Any], j: Mapping[str, Any], base: float, width: int, key: str) -> Rope:
    f = _number(s, "factor", key)
    return Rope(tuple(x / f for x in inv))


def _llama3(inv: list[float], s: dict[str, Any], j: Mapping[str, Any], base: float, width: int, key: str) -> Rope:
    """Long wavelengths are divided by the factor, short ones kept, those between are blended."""
    f, low, high = (_number(s, n, key) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(s, "original_max_position_embeddings", key)
    if high == low:
        raise ConfigError(f"{key}: low_freq_factor and high_freq_factor are both {low}")
    out = []
    for x in inv:
        wave = 2 * math.pi / x
        if wave < original / high:
            out.append(x)
        elif wave > original / low:
            out.append(x / f)
        else:
            blend = (original / wave - low) / (high - low)
            out.append((1 - blend) * x / f + blend * x)
    return Rope(tuple(out))


def _yarn(inv: list[float], s: dict[str, Any], j: Mapping[str, Any], base: float, width: int, key: str) -> Rope:
    """Peng et al. 2023 (arXiv:2309.00071).  Without an original length, max_position_embeddings is taken."""
    f = _number(s, "factor", key)
    original = _number(s, "original_max_position_embeddings", key, j.get("max_position_embeddings"))
    fast, slow = _number(s, "beta_fast", key, 32.0), _number(s, "beta_slow", key, 1.0)

    def channel(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    lo, hi = channel(fast), channel(slow)
    if s.get("truncate", True):
        lo, hi = math.floor(lo), math.ceil(hi)
    lo, hi = max(lo, 0), min(hi, width - 1)
    out = []
    for i, x in enumerate(inv):
        ramp = min(max((i - lo) / max(hi - lo, 1e-3), 0.0), 1.0)
        out.append(x / f * ramp + x * (1 - ramp))
    if s.get("attention_factor") is not None:
        return Rope(tuple(out), _number(s, "attention_factor", key))
    one, of_all = (_number(s, n, key) if s.get(n) else None for n in ("mscale", "mscale_all_dim"))
    scale = _mscale(f, one) / _mscale(f, of_all) if one and of_all else _mscale(f, 1.0)
    return Rope(tuple(out), scale)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(inv: list[float], s: dict[str, Any], j: Mapping[str, Any], base: float, width: int, key: str) -> Rope:
    """One divisor per channel pair, as GGUF stores it in rope_freqs.weight."""
    factors = s.get("factors")
    if not isinstance(factors, list | tuple) or len(factors) != len(inv) or not all(
        isinstance(f, int | float) and 0 < f < 1e30 for f in factors
    ):
        raise ConfigError(f"{key}.factors must be {len(inv)} positive numbers")
    return Rope(tuple(x / f for x, f in zip(inv, factors, strict=True)))


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "factors": _factors}
