"""Words that must not occur: from text to token ids, and what a model then writes."""

import pytest
import tiny

import afl
from afl.errors import ConfigError
from afl.run.generate import bad_words


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return afl.load(tiny.folder(tmp_path_factory.mktemp("m"), "llama"))


@pytest.fixture(scope="module")
def ids():
    """The tokens of a text, by the tokenizer's own package."""
    bpe = tiny.tokenizer()
    return lambda text: tuple(bpe.encode(text, add_special_tokens=False).ids)


def test_a_word_is_banned_at_the_start_and_after_a_space(model, ids):
    assert ids("cat") != ids(" cat")
    assert set(bad_words(model, ["cat"])) == {ids("cat"), ids(" cat")}
    assert set(bad_words(model, [" cat"])) == {ids("cat"), ids(" cat")}
    assert set(bad_words(model, ["  cat"])) == {ids("cat"), ids(" cat"), ids("  cat")}
    assert set(bad_words(model, ["cat", "France", "cat"])) == {ids(w) for w in ("cat", " cat", "France", " France")}
    assert bad_words(model, []) == ()


def test_no_special_token_is_added_and_a_special_one_can_be_banned(model, ids):
    assert bad_words(model, ["<|end|>"])[0] == ids("<|end|>") and len(ids("<|end|>")) == 1


@pytest.mark.parametrize("words", [[""], ["cat", " "], ["\n\t"]])
def test_a_word_without_characters_is_refused(model, words):
    with pytest.raises(ConfigError, match="bad word is empty"):
        bad_words(model, words)


def test_a_model_without_a_tokenizer_says_what_to_give_instead(tmp_path):
    with pytest.raises(ConfigError, match="bad_words_ids"):
        bad_words(afl.load(tiny.folder(tmp_path / "m", text=False)), ["cat"])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_word_of_several_tokens_is_broken_at_its_last_one_only(model, ids, depth):
    """The logits favour the word's tokens so much that the model writes nothing else unless it must."""
    word = ids("xyz")
    assert len(word) == 3
    how = {"max_tokens": 12, "ignore_eos": True, "temperature": 5.0, "logit_bias": {i: 100.0 for i in word}}
    broken = 0
    for seed in range(12):
        free = model.generate([[5]], options={"depth": depth}, seed=seed, **how)[0]
        held = model.generate([[5]], options={"depth": depth}, seed=seed, bad_words_ids=[word], **how)[0]
        assert set(free.text) <= set("xyz") and "xyz" not in held.text
        broken += "xyz" in free.text
        before = len(free.text.partition("xy")[0]) + 2          # no draw up to here is touched by the ban
        assert held.text[:before] == free.text[:before]
    assert broken >= 3, "the word must come up by itself, or nothing is tested"
