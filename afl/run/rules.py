"""What can be asked for, as one table: `afl run` refuses by it before anything loads, `afl check` answers by it.

A rule sees an `Ask`, all that is known before a weight is read, and returns a `Violation` with the nearest values that
hold, or None.  A rule whose facts are not known yet is left out, so the same table serves the first millisecond of a
command (options and chip, without torch) and the moment when the model's sizes are known.  docs/rules.md is written
from it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from afl import chip as chips
from afl import config as configs
from afl.chip import Chip
from afl.errors import ConfigError, nearest, unknown, violations
from afl.run.ask import TABLE, Ask, Violation, rule

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")     # keys of config.json

OF_MODELS = {"architecture", "mixture of experts", "quantised checkpoint"}      # no Config of a model can be made


def problems(ask: Ask) -> list[Violation]:
    """Every violation, in the order of the table."""
    found = []
    for r in TABLE:
        if all(getattr(ask, n) is not None for n in r.needs):
            v = r.check(ask)
            if v is not None:
                found.append(attrs.evolve(v, rule=r.name, not_yet=r.not_yet))
    return found


def refuse(ask: Ask) -> None:
    """Raise ConfigError with everything that does not hold."""
    found = problems(ask)
    if found:
        raise ConfigError(violations("options that do not hold", map(str, found)))


# ---- options by themselves ------------------------------------------------------------------------------------------


def _range(name: str) -> Callable[[Ask], Violation | None]:
    def check(a: Ask) -> Violation | None:
        value, (low, high) = getattr(a.config, name), configs.RANGES[name]
        text = configs.out_of_range(name, value)
        if text is None:
            return None
        close = (min(max(value, low), high),) if isinstance(value, int) else ()
        return Violation(text, value, f"{low} to {high}", close)

    return check


for _name, (_low, _high) in configs.RANGES.items():
    rule(f"range of {_name}", f"{_low} to {_high}", _name)(_range(_name))


@rule("a token for every request", "max_step_tokens is at least max_seqs: a step gives every running request a token",
      "max_step_tokens max_seqs")
def _(a: Ask) -> Violation | None:
    tokens, rows = a.config.max_step_tokens, a.config.max_seqs
    text = configs.too_few_tokens(tokens, rows)
    return None if text is None else Violation(text, (tokens, rows), "max_step_tokens >= max_seqs", (rows, tokens))


@rule("threads of this process", "threads is at most the cores that this process may use", "threads")
def _(a: Ask) -> Violation | None:
    cores, wish = configs.usable_cores(), a.config.threads
    if not isinstance(wish, int) or wish <= cores:
        return None
    text = f"threads is {wish}, this process may use {cores} cores; more only slows it down"
    return Violation(text, wish, f"at most {cores}", (cores,))


@rule("seed", "seed is a whole number from 0 on, or not given", "seed")
def _(a: Ask) -> Violation | None:
    wish = a.config.seed
    if wish is None or (isinstance(wish, int) and not isinstance(wish, bool) and wish >= 0):
        return None
    return Violation(f"seed is {wish!r}, must be a whole number from 0 on", wish, "0 or more", (0,))


@rule("policy", "policy is known, and the parts of a composed one do not decide the same thing", "policy")
def _(a: Ask) -> Violation | None:
    from afl.run.policies import policy_of

    try:
        policy_of(a.config.policy)
    except ConfigError as e:
        return Violation(str(e), a.config.policy, "a policy, or policies that combine, or a .json file")
    return None


# ---- with the chip --------------------------------------------------------------------------------------------------


@rule("chip", "the chip is known", "chip")
def _(a: Ask) -> Violation | None:
    known = chips.names()
    if a.chip is not None or a.config.chip in known or a.config.chip in chips.registered():
        return None
    text = unknown("chip", a.config.chip, known)
    return Violation(text, a.config.chip, ", ".join(known), tuple(nearest(a.config.chip, known, 1)))


@rule("dtype of the chip", "dtype is auto or one of the chip's", "dtype chip", "chip")
def _(a: Ask) -> Violation | None:
    assert a.chip is not None
    wish = a.config.dtype
    known = ("auto", *a.chip.dtypes)
    if chips.DTYPE_ALIASES.get(wish, wish) in known:
        return None
    text = f"dtype {wish!r} is not one of chip {a.chip.name!r}: {', '.join(known)}"
    return Violation(text, wish, ", ".join(known), (a.chip.dtypes[0],))


@rule("weights of the chip", "weights is auto, a dtype of the chip or a scheme, and the chip multiplies with it in the "
      "compute dtype", "weights dtype chip", "chip dtype")
def _(a: Ask) -> Violation | None:
    assert a.chip is not None and a.dtype is not None
    from afl.run.precision import stores  # kernels, and so torch
    from afl.types import DTYPES

    try:
        stores(a.chip, a.config.weights, DTYPES[a.dtype])
    except ConfigError as e:
        return Violation(str(e), a.config.weights, "weights that the chip has a kernel for", ("auto",))
    return None


@rule("tokens of a block", "block_tokens is one of the chip's sizes, and small enough for the model's heads",
      "block_tokens chip", "chip caches")
def _(a: Ask) -> Violation | None:
    assert a.chip is not None and a.caches is not None
    found = block_tokens(max((s.head_size for s in a.caches), default=0), a.chip, a.config.block_tokens)
    return found if isinstance(found, Violation) else None


def block_tokens(head_size: int, chip: Chip, wish: int = 0) -> int | Violation:
    """Tokens of a cache block: the wish, or the chip's default, or the largest block below it that heads allow."""
    default, allowed = chip.limits.block_tokens
    elements = chip.limits.block_elements
    most = elements // head_size if elements and head_size else max(default, wish, *allowed)
    fitting = tuple(n for n in (*allowed, default) if n <= most)
    if not fitting:
        return Violation(f"chip {chip.name!r} has no block for heads of {head_size} channels: tokens of a block times "
                         f"channels are at most {elements}, its smallest block has {min(allowed)} tokens", head_size,
                         f"heads of at most {elements // min(allowed)} channels")
    if not wish:
        return max(n for n in fitting if n <= default) if min(fitting) <= default else min(fitting)
    close = (min(fitting, key=lambda n: abs(n - wish)),)
    if allowed and wish not in allowed:
        names = ", ".join(map(str, allowed))
        return Violation(f"block_tokens {wish} is not possible on chip {chip.name!r}: it has {names}", wish, names,
                         close)
    if wish > most:
        return Violation(f"block_tokens {wish} is too large for heads of {head_size} channels on chip {chip.name!r}: "
                         f"tokens of a block times channels are at most {elements}; ask for at most {most}", wish,
                         f"at most {most}", close)
    return wish


# ---- with the model -------------------------------------------------------------------------------------------------


@rule("positions of the model", "max_model_len is at most the positions that the model was made for", "max_model_len",
      "max_len")
def _(a: Ask) -> Violation | None:
    wish, most = a.config.max_model_len, a.max_len
    assert most is not None
    if not isinstance(wish, int) or wish <= most:
        return None
    text = f"max_model_len {wish} is beyond the model's {most} positions; ask for at most {most}"
    return Violation(text, wish, f"at most {most}", (most,))


@rule("architecture", "config.json names an architecture that there is a model file for", "model", "settings")
def _(a: Ask) -> Violation | None:
    assert a.settings is not None
    if _known(a.settings) or experts(a.settings) > 1:
        return None
    from afl.models.spec import registered

    name = str(a.settings["architectures"][0])
    return Violation(unknown("architecture", name, registered()), name, "an architecture of `afl models`",
                     tuple(nearest(name, registered(), 1)))


@rule("mixture of experts", "the model is dense, unless a model file of a plugin computes its experts", "model",
      "settings", not_yet=True)
def _(a: Ask) -> Violation | None:
    assert a.settings is not None
    count = experts(a.settings)
    if count <= 1 or _known(a.settings):
        return None
    return Violation(f"not yet: this is a mixture of {count} experts, and no model file computes one; take a dense "
                     "model", count, "a dense model")


@rule("quantised checkpoint", "the checkpoint is not quantised (GGUF files are dequantised while they are read)",
      "model", "settings", not_yet=True)
def _(a: Ask) -> Violation | None:
    assert a.settings is not None
    found = a.settings.get("quantization_config")
    if found is None:
        return None
    kind = found.get("quant_method") if isinstance(found, Mapping) else None
    return Violation(f"not yet: quantised checkpoints cannot be read (quantization_config, quant_method {kind!r:.40}); "
                     "take the 16-bit one", kind, "a checkpoint of a 16 or 32 bit dtype, or a .gguf file")


def _known(settings: Mapping[str, Any]) -> bool:
    """Whether there is a model file for the checkpoint's architecture."""
    from afl.models.spec import registered
    from afl.plugins import load_models

    load_models()
    return any(name in registered() for name in settings["architectures"])


def experts(settings: Mapping[str, Any]) -> int:
    """How many experts a layer of the model in config.json has; 1 for a dense one."""
    counts = [n for key in EXPERTS if type(n := settings.get(key)) is int]
    return max(counts, default=1)


@rule("kernels of the chip", "every op of the model's step has a kernel that takes its dtypes, formats and sizes",
      "model chip dtype block_tokens", "unserved")
def _(a: Ask) -> Violation | None:
    assert a.unserved is not None
    return Violation("\n".join(a.unserved), a.unserved, "sizes that kernels take") if a.unserved else None


# ---- parallel sizes -------------------------------------------------------------------------------------------------

for _axis, _what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"), ("ep", "expert")):
    def _size(a: Ask, axis: str = _axis) -> Violation | None:
        n = getattr(a, axis)
        return None if n >= 1 else Violation(f"{axis} is {n}, must be 1 or more", n, "1 or more", (1,))

    rule(f"size of {_axis}", f"{_what} parallel size, 1 or more", _axis)(_size)


@rule("heads over tp", "tp divides the query heads; it divides the kv heads, or is a multiple of them, which are then "
      "held by several ranks", "tp", "c")
def _(a: Ask) -> Violation | None:
    if _heads_fit(a.c, a.tp):
        return None
    text = f"tp {a.tp} does not divide {a.c.h} query heads" if a.c.h % a.tp else (
        f"tp {a.tp} neither divides {a.c.k} kv heads nor is a multiple of them")
    return _tp(a, text, "a divisor of the heads")


@rule("rows over tp", "tp divides the ffn size and the vocabulary, whose rows are cut evenly", "tp", "c")
def _(a: Ask) -> Violation | None:
    bad = [f"{name} {n}" for name, n in _rows(a.c) if a.tp > 1 and n % a.tp]
    return _tp(a, f"tp {a.tp} does not divide the {' and the '.join(bad)}", "a divisor of both") if bad else None


def legal_tp(c: Any) -> list[int]:
    """Every tensor parallel size that a model of this Config can have."""
    return [n for n in range(1, c.h + 1) if _heads_fit(c, n) and all(size % n == 0 for _, size in _rows(c))]


def kv_heads(k: int, tp: int, rank: int) -> tuple[int, ...]:
    """The kv heads that a rank holds: its share, or one that it has in common with its neighbours.

    >>> [kv_heads(2, 4, r) for r in range(4)], kv_heads(4, 2, 1)
    ([(0,), (0,), (1,), (1,)], (2, 3))
    """
    return (rank * k // tp,) if tp >= k else tuple(range(rank * k // tp, (rank + 1) * k // tp))


def _heads_fit(c: Any, tp: int) -> bool:
    return tp >= 1 and c.h % tp == 0 and (c.k % tp == 0 or tp % c.k == 0)


def _rows(c: Any) -> Iterable[tuple[str, int]]:
    return [(what, n) for what, n in (("ffn size", getattr(c, "f", 0)), ("vocabulary", c.v)) if n]


def _tp(a: Ask, text: str, expected: str) -> Violation:
    legal = legal_tp(a.c)
    close = (max((n for n in legal if n < a.tp), default=0), min((n for n in legal if n > a.tp), default=0))
    close = tuple(n for n in close if n)
    return Violation(f"{text}; nearest: {' or '.join(map(str, close))}", a.tp, expected, close)


def _later(axis: str, why: str) -> None:
    def check(a: Ask) -> Violation | None:
        n = getattr(a, axis)
        return None if n <= 1 else Violation(f"not yet: {axis} {n}; {why}", n, f"{axis} 1", (1,))

    rule(f"{axis} beyond 1", why, axis, not_yet=True)(check)


_later("pp", "a model is not cut into stages of layers")
_later("dp", "engines do not agree on common steps")
_later("ep", "no model has experts to spread over ranks")


@rule("ranks of experts", "ep is a group over dp x tp and divides it", "ep dp tp")
def _(a: Ask) -> Violation | None:
    ranks = a.dp * a.tp
    if a.ep < 1 or ranks < 1 or ranks % a.ep == 0:
        return None
    close = (math.gcd(ranks, a.ep),)
    return Violation(f"ep {a.ep} does not divide dp x tp = {ranks}; nearest: {close[0]}", a.ep, f"a divisor of {ranks}",
                     close)


# ---- memory ---------------------------------------------------------------------------------------------------------


@rule("blocks in memory", "the cache has at least one block, and kv_blocks fit, beside parameters, temporaries and "
      "buffers", "kv_blocks", "budget")
def _(a: Ask) -> Violation | None:
    b, wish = a.budget, a.config.kv_blocks
    assert b is not None
    if wish and wish > b.blocks:
        return Violation(f"kv_blocks {wish} need {wish * b.block >> 20} MiB, {b.left >> 20} MiB are available on "
                         f"{b.where}; ask for at most {b.blocks}", wish, f"at most {b.blocks}", (b.blocks,))
    if wish or b.blocks:
        return None
    return Violation(f"{b.where} does not hold two cache blocks of {b.block} bytes: of {b.total >> 20} MiB, "
                     f"{b.fraction:.0%} may be used, {b.others >> 20} MiB are in use by others and {b.own >> 20} MiB "
                     "are needed for everything else; " + (f"nearest: tp {b.ranks}" if b.ranks else
                     "free memory, or take a smaller model or block_tokens"), b.own,
                     f"at most {b.usable - 2 * b.block} bytes", (b.ranks,) if b.ranks else ())
