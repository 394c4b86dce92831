"""Log-probabilities against log_softmax and sorting."""

import math

import numpy as np
import pytest
import torch

from afl.run.logprobs import top_logprobs


def one(logits: list[float], token: int, n: int):
    return top_logprobs(torch.tensor([logits]), torch.tensor([token], dtype=torch.int32), n)[0]


def test_rank_counts_tokens_at_least_as_likely():
    assert one([3.0, 1.0, 2.0], 2, 0).rank == 2
    assert one([3.0, 1.0, 2.0], 0, 0).rank == 1
    assert one([2.0, 2.0, 1.0], 0, 0).rank == 2


def test_b10_zero_gives_the_sampled_token_alone():
    found = one([0.0, 0.0, math.log(2.0)], 1, 0)
    assert (found.token, found.top) == (1, ())
    assert found.logprob == pytest.approx(math.log(0.25), abs=1e-7)


def test_values_equal_log_softmax_and_order_that_of_a_stable_sort():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(np.round(rng.standard_normal((5, 401)) * 4).astype(np.float32))      # many ties
    token = torch.from_numpy(rng.integers(0, 401, 5).astype(np.int32))
    want = x.double().log_softmax(-1)
    order = want.sort(dim=-1, descending=True, stable=True).indices
    for n in (0, 1, 7, 400, 401, 1000, -1):
        for i, found in enumerate(top_logprobs(x, token, n)):
            k = 401 if n < 0 else min(n, 401)
            assert found.logprob == pytest.approx(float(want[i, token[i]]), abs=1e-12)
            assert [t for t, _ in found.top] == order[i, :k].tolist()
            assert [p for _, p in found.top] == pytest.approx(want[i, order[i, :k]].tolist(), abs=1e-12)


def test_more_alternatives_only_append():
    x = torch.randn(1, 100, generator=torch.Generator().manual_seed(1)).round()
    token = torch.zeros(1, dtype=torch.int32)
    longest = top_logprobs(x, token, 100)[0]
    for n in range(100):
        assert top_logprobs(x, token, n)[0].top == longest.top[:n]


def test_masked_and_huge_logits_stay_finite_where_they_can():
    found = one([1e30, -torch.inf, 1e30], 1, -1)
    assert found.logprob == -torch.inf and found.rank == 3
    assert [p for _, p in found.top] == pytest.approx([math.log(0.5), math.log(0.5), -torch.inf])


def test_probabilities_sum_to_one():
    found = one(np.linspace(-9, 9, 50).tolist(), 3, -1)
    assert sum(math.exp(p) for _, p in found.top) == pytest.approx(1.0, abs=1e-12)
