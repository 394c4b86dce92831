"""I05: every pair and triple of the engine's boolean options gives the tokens of the plainest run, in bounded time."""

import itertools
import signal

import attrs
import pytest

from afl.run.load import random_model

SIZES = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False,
)
PROMPTS = [[3, 1, 4, 1, 5], [9] * 20, [3, 1, 4, 1, 5, 9, 2, 6, 5], [7]]
# name -> the options that stand for False and True
OPTIONS = {
    "eager": ({}, {"eager": True}), "checked": ({}, {"checked": True}), "references": ({}, {"references": True}),
    "lax": ({}, {"strict": False}), "cache": ({"prefix_cache": False}, {"prefix_cache": True}),
    "late": ({"depth": 1}, {"depth": 2}), "chunks": ({"max_step_tokens": 64}, {"max_step_tokens": 5}),
    "tight": ({"block_tokens": 16}, {"block_tokens": 4, "kv_blocks": 13}),
}


def covering():
    """16 rows of 8 bits in which any three columns take all 8 values: no three of these sums are dependent."""
    for a, b, c, d in itertools.product((0, 1), repeat=4):
        yield a, b, c, d, a ^ b ^ c, a ^ b ^ d, a ^ c ^ d, b ^ c ^ d


def test_the_rows_cover_every_triple():
    rows = list(covering())
    for columns in itertools.combinations(range(len(OPTIONS)), 3):
        assert len({tuple(r[c] for c in columns) for r in rows}) == 8


@pytest.fixture(scope="module")
def model():
    return attrs.evolve(random_model("LlamaForCausalLM", SIZES, seed=3), eos_ids=(7,))


@pytest.fixture(scope="module")
def want(model):
    plain = {"eager": True, "references": True, "depth": 1, "max_seqs": 1, "prefix_cache": False}
    return [list(model.generate([p], options=plain, max_tokens=9)[0].token_ids) for p in PROMPTS]


@pytest.mark.parametrize("row", list(covering()), ids=lambda r: "".join(map(str, r)))
def test_options_together_change_no_token(model, want, row):
    options = {"max_seqs": 3, "max_model_len": 40}
    for (off, on), bit in zip(OPTIONS.values(), row, strict=True):
        options |= on if bit else off

    def late(*_):
        raise TimeoutError(f"{options} hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        got = model.generate([*PROMPTS, PROMPTS[0]], options=options, max_tokens=9)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert [list(x.token_ids) for x in got] == [*want, want[0]], options
