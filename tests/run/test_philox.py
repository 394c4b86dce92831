"""The counter generator against published vectors, and the law of its numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from afl.run.philox import SAMPLE, philox, uniforms, uniforms_plain

ONES = 0xFFFFFFFF
VECTORS = [     # Random123's known answers
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize("counter, key, want", VECTORS)
def test_philox_gives_the_published_words(counter, key, want):
    assert philox(np.array([counter], np.uint32), np.array([key], np.uint32))[0].tolist() == want


def test_a_uniform_is_made_of_the_first_two_words():
    want = ((0x6627E8D5 >> 6) * 2**26 + (0xE169C58D >> 6) + 0.5) / 2**52
    assert uniforms(np.zeros(1, np.uint64), np.zeros(1, np.int64)).tolist() == [want]
    assert abs(want - ((0x6627E8D5 >> 8) + 0.5) / 2**24) < 2**-24      # a chip of 24 bits sees the same number, rounded


def test_the_borders_are_out_of_reach():
    top = (2**52 - 1 + 0.5) * 2.0**-52
    assert 0.0 < 0.5 * 2.0**-52 and top < 1.0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=9), st.integers(0, 9))
def test_compiled_and_plain_numbers_are_the_same_bits(pairs, purpose):
    seed, position = np.array([s for s, _ in pairs], np.uint64), np.array([p for _, p in pairs], np.int64)
    got = uniforms(seed, position, purpose)
    assert got.tolist() == uniforms_plain(seed, position, purpose).tolist()
    assert ((got > 0) & (got < 1)).all()
    assert uniforms(seed[::-1], position[::-1], purpose).tolist() == got[::-1].tolist()     # no row knows of another


def test_both_halves_of_a_seed_the_position_and_the_purpose_matter():
    one = np.ones(1, np.uint64)
    numbers = {float(uniforms(seed, np.array([p]), purpose)[0])
               for seed in (one, one << np.uint64(32), 2 * one) for p in (0, 1, 7) for purpose in (SAMPLE, 1)}
    assert len(numbers) == 18


@pytest.mark.parametrize("along", ["position", "seed"])
def test_numbers_are_uniform(along: str):
    n = np.arange(200_000)
    fixed = np.full(len(n), 42)
    u = uniforms(fixed.astype(np.uint64), n) if along == "position" else uniforms(n.astype(np.uint64), fixed)
    assert kstest(u, "uniform").pvalue > 0.001
    assert abs(float(-np.log(u).mean()) - 1) < 0.01
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.01
    assert len(np.unique(u)) == len(u)
