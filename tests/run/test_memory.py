"""Sizes of cache blocks and pools."""

import attrs
import pytest
import torch

from afl import plugins
from afl.chip import Chip, Limits
from afl.config import EngineConfig
from afl.errors import ConfigError
from afl.ops.caches.paged_kv import PagedKVSpec
from afl.run.memory import size_pool, tokens_of_block
from afl.types import TensorType

HALF = torch.float16
FREE = 1 << 30


def heads(*sizes: int) -> tuple[PagedKVSpec, ...]:
    return tuple(PagedKVSpec(2, e) for e in sizes)


@pytest.mark.parametrize(("sizes", "tokens"), [
    ((64,), 128), ((128,), 128), ((144,), 64), ((256,), 64), ((64, 256), 64),
])
def test_a_block_of_310p_is_the_largest_that_the_heads_allow(sizes, tokens):
    chip = plugins.chip("310p")
    assert tokens_of_block(heads(*sizes), chip) == tokens
    assert size_pool(heads(*sizes), 512, chip, HALF, EngineConfig(), FREE).block_tokens == tokens


@pytest.mark.parametrize(("chip", "sizes", "wish", "words"), [
    ("310p", (256,), 128, ("256 channels", "16384", "at most 64")), ("310p", (64,), 96, ("96", "64, 128")),
    ("310p", (512,), 0, ("no block for heads of 512", "64 tokens")), ("a2", (64,), 64, ("a2", "it has 128")),
])
def test_a_block_that_cannot_be_is_refused_with_the_figures(chip, sizes, wish, words):
    with pytest.raises(ConfigError) as e:
        tokens_of_block(heads(*sizes), plugins.chip(chip), wish)
    assert all(w in str(e.value) for w in words), e.value


def test_a_chip_without_limits_takes_any_block():
    cpu = plugins.chip("cpu")
    assert tokens_of_block(heads(8), cpu) == 16 and tokens_of_block(heads(4096), cpu, 37) == 37
    assert tokens_of_block((), Chip("toy", limits=Limits(block_tokens=(8, (4, 8))))) == 8


def test_a_cache_has_the_format_that_the_chip_names_and_the_bytes_of_its_elements():
    spec = PagedKVSpec(2, 64)
    for name, fmt in (("310p", "nz"), ("a2", "nd"), ("cpu", "nd")):
        t = spec.types(plugins.chip(name), 5, 128, HALF)
        assert t.k == t.v == TensorType((5, 128, 2, 64), HALF, fmt)
        assert 5 * spec.block_bytes(128, HALF) == t.k.nbytes + t.v.nbytes
    with pytest.raises(ConfigError, match="unknown layout 'bsnx'"):
        spec.types(attrs.evolve(plugins.chip("a2"), name="odd", layouts={"kv.paged": "bsnx"}), 5, 128, HALF)
