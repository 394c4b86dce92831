"""Rotary settings of hostile and of odd checkpoints: one clear error, never a crash, a hang or a wrong table."""

import math

import pytest

from afl.errors import ConfigError
from afl.models.config_keys import Keys
from afl.models.rope_config import rope_of

JUNK = [True, [], [1], {}, "x", "a" * 100_000, float("nan"), float("inf"), -1, 0, 10**400, -(10**400), 1e308]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


def refused(j: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=name) as e:
        rope_of(j, 8)
    assert len(str(e.value)) < 500


@pytest.mark.parametrize("value", JUNK, ids=lambda v: f"{v!r:.12}")
@pytest.mark.parametrize("name", ["rope_theta", "partial_rotary_factor"])
def test_top_level_numbers_must_be_numbers_in_range(name, value):
    refused({name: value}, name)
    refused({"rope_parameters": {name: value}}, name)


@pytest.mark.parametrize("value", JUNK, ids=lambda v: f"{v!r:.12}")
@pytest.mark.parametrize(("base", "name"), [
    *((YARN, n) for n in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")),
    *((LLAMA3, n) for n in LLAMA3 if n != "rope_type"),
])
def test_numbers_of_a_scaling_must_be_numbers_in_range(base, name, value):
    refused({"rope_scaling": base | {name: value}}, name)


@pytest.mark.parametrize("value", [v for v in JUNK if v], ids=lambda v: f"{v!r:.12}")
@pytest.mark.parametrize("name", ["mscale", "mscale_all_dim"])
def test_weights_of_the_yarn_factor_must_be_numbers_or_absent(name, value):
    refused({"rope_scaling": YARN | {name: value}}, name)


@pytest.mark.parametrize("kind", [["llama3"], {"a": 1}, 7, True, "yarm", "a" * 100_000], ids=lambda v: f"{v!r:.12}")
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_a_kind_that_is_no_known_name_is_refused(key, kind):
    refused({"rope_scaling": {key: kind, "factor": 2.0}}, "rope_type")


@pytest.mark.parametrize("part", [1.5, 1e10, 0.1])
def test_what_rotates_is_an_even_part_of_a_head(part):
    refused({"partial_rotary_factor": part}, "partial_rotary_factor")


def test_yarn_takes_its_factor_or_computes_it():
    assert rope_of({"rope_scaling": YARN | {"attention_factor": 1.25}}, 8).scale == 1.25
    assert rope_of({"rope_scaling": YARN}, 8).scale == pytest.approx(0.1 * math.log(4) + 1)
    both = YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}
    assert rope_of({"rope_scaling": both}, 8).scale == pytest.approx((0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert rope_of({"rope_scaling": YARN | {"mscale": 0, "mscale_all_dim": None}}, 8) == rope_of(
        {"rope_scaling": YARN}, 8
    )


def test_a_huge_value_is_not_repeated_in_full():
    keys = Keys({"hidden_size": "a" * 100_000, "hidden_act": ["b"] * 100_000, "rms_norm_eps": {"c": "d" * 100_000},
                 "attention_bias": "e" * 100_000}, "any")
    keys.size("hidden_size")
    keys.only("hidden_act", ("silu",), "only silu is computed")
    keys.number("rms_norm_eps", 1e-6)
    keys.flag("attention_bias", False)
    with pytest.raises(ConfigError) as e:
        keys.done()
    assert len(str(e.value)) < 1000 and all(k in str(e.value) for k in keys.j)
