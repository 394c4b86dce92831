"""Weight schemes say what travels with an expert, or why it cannot."""

import pytest

from afl.dist.eplb.refusals import SCHEMES, expert_bytes, movable, refusals, require_movable
from afl.errors import ConfigError


def test_packed_four_bit_weights_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="eight 4-bit weights to an int32.*no part of it that is one expert"):
        require_movable("w4a4_flatquant")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_lists_what_travels_or_says_why_not(scheme):
    s = SCHEMES[scheme]
    assert bool(s.pieces) != bool(s.why_not)
    assert (scheme in movable()) == (refusals(scheme) == [])
    both = refusals(scheme, lora=True)
    assert len(both) == 1 + bool(s.why_not) and "adapters" in both[-1]


def test_all_reasons_come_at_once():
    with pytest.raises(ConfigError, match="(?s)2 problems.*flatquant.*adapters"):
        require_movable("w4a4_flatquant", lora=True)


def test_unknown_schemes_get_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'w8a8_dynamic'"):
        refusals("w8a8_dynamik")


def test_bytes_of_an_expert():
    d, f = 7168, 2048
    assert expert_bytes("none", d, f) == 2 * 3 * d * f == 88_080_384
    assert expert_bytes("w8a8_dynamic", d, f) == 3 * d * f + 4 * (2 * f + d)
    assert expert_bytes("w4a8_dynamic", d, f) == 3 * d * f // 2 + 8 * (2 * f + d)
    assert expert_bytes("w8a8_mxfp8", d, f) == 3 * d * f + 3 * d * f // 32
    assert expert_bytes("w4a4_mxfp4", d, f) == 3 * d * f // 2 + 3 * d * f // 32
    with pytest.raises(ConfigError):
        expert_bytes("w4a16", d, f)
