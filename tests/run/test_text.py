"""Tokenizer, incremental detokeniser, stop strings: streaming equals decoding everything at once."""

import json
import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from afl.errors import CheckpointError, RequestError
from afl.run.text import Detokenizer, StopStrings, TextStream, Tokenizer

CORPUS = ["the cat sat, the dog ran", "naïve café 你好，世界 🤖🤖", "a,b,c a,b c def stop here"] * 3


def byte_level() -> Tokenizer:
    t = tokenizers.Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "<|end|>"],
        show_progress=False,
    )
    t.train_from_iterator(CORPUS, trainer)
    t.add_tokens([AddedToken("<think>", special=False)])
    t.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", t.token_to_id("<s>"))])
    return Tokenizer(t.to_str(), eos_ids=(77,), special_tokens={"eos_token": "<|end|>", "bos_token": "<s>"})


def byte_fallback() -> Tokenizer:
    """Like Llama 2: pieces with a word mark, and bytes for what has no piece."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in ("▁the", "▁", "the", "a", "b", ",", "é", "▁cat"):
        vocab[piece] = len(vocab)
    t = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(t.to_str())


MAKERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.fixture(scope="module", params=sorted(MAKERS))
def tokenizer(request):
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def bpe():
    return byte_level()


def pieces(rng: random.Random, ids: list[int]) -> list[list[int]]:
    out = []
    while ids:
        n = rng.choice([1, 1, 1, 2, 5])
        out, ids = [*out, ids[:n]], ids[n:]
    return out


def test_special_tokens_are_added_only_when_asked(bpe):
    bos = bpe.inner.token_to_id("<s>")
    assert bpe.encode("the cat", special=True) == [bos, *bpe.encode("the cat", special=False)]
    assert bpe.bos_id == bos and bpe.eos_ids == (77, bpe.inner.token_to_id("<|end|>"))
    assert bpe.decode([bos, *bpe.encode("the cat", special=False)]) == "the cat"
    assert bpe.encode("", special=False) == []


def test_settings_of_a_training_run_do_not_cut_prompts(bpe):
    t = tokenizers.Tokenizer.from_str(bpe.inner.to_str())
    t.enable_truncation(2)
    t.enable_padding(length=50)
    assert Tokenizer(t.to_str()).encode("the cat sat", special=True) == bpe.encode("the cat sat", special=True)


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"model": {"type": "BPE"}}', b"\xff", '{"a":' * 5000])
def test_a_tokenizer_that_cannot_be_used_is_one_clear_error(text):
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        Tokenizer(text)


def test_half_a_character_in_a_prompt_is_refused(bpe):
    with pytest.raises(RequestError, match="Unicode"):
        bpe.encode("a\ud800", special=False)


def test_text_streams_as_it_decodes(tokenizer):
    rng = random.Random(0)
    for text in [*CORPUS, "é" * 50, "🤖", " the  the", "日本語テキスト🤖!", ""]:
        ids = tokenizer.encode(text, special=False)
        d = Detokenizer(tokenizer)
        parts = [d.push(p) for p in pieces(rng, ids)]
        assert "".join(parts) + d.end() == tokenizer.decode(ids), text
        assert not any("\ufffd" in p for p in parts)


def test_random_ids_stream_as_they_decode(bpe):
    """Random bytes: mostly invalid UTF-8, with long runs of it."""
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(bpe.vocab_size) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.5:
            ids = [bpe.inner.token_to_id(c) for c in rng.choices(pre_tokenizers.ByteLevel.alphabet(), k=len(ids))]
        d = Detokenizer(bpe)
        assert "".join(d.push(p) for p in pieces(rng, ids)) + d.end() == bpe.decode(ids)


def test_ids_without_text_and_special_ones_are_skipped(bpe):
    end, think = bpe.inner.token_to_id("<|end|>"), bpe.inner.token_to_id("<think>")
    ids = [think, *bpe.encode("the", special=False), end, 999999]
    assert Detokenizer(bpe).push(ids) == "<think>the"
    assert Detokenizer(bpe, skip_special=False).push(ids) == "<think>the<|end|>"


def test_work_per_token_does_not_grow_with_the_length(tokenizer):
    d, seen = Detokenizer(tokenizer), []
    decode = d._decode
    d._decode = lambda ids, **how: (seen.append(len(ids)), decode(ids, **how))[1]
    ids = tokenizer.encode("the cat, é🤖 ", special=False) * 200
    for i in ids:
        d.push([i])
    bad = tokenizer.inner.token_to_id("<0xFF>") or tokenizer.inner.token_to_id("ÿ")
    for _ in range(500):
        d.push([bad])
    assert max(seen) <= 50 and len(seen) <= 2.1 * (len(ids) + 500)


@pytest.mark.parametrize("tokens, stop, shown", [
    (["a", ",b", ",", "c d"], ["b,c"], "a,"),
    (["x", "ab", "ab", "abc", "y"], ["ababc"], "xab"),
    (["one", " stop"], ["stop", "one s"], ""),
    (["aaa", "aab"], ["aab"], "aaa"),
    (["abc"], ["abcd"], "abc"),
    (["ab", "c"], ["abc", "bc", "c"], ""),
    (["hello"], [], "hello"),
])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_found_across_pieces(tokens, stop, shown, include):
    def run(parts):
        s = StopStrings(stop, include=include)
        out = []
        for i, p in enumerate(parts):
            out.append(s.push(p))
            if s.matched is None and stop:
                given, fed = sum(map(len, out)), sum(map(len, parts[: i + 1]))
                assert fed - given <= max(map(len, stop)) - 1
        return "".join(out) + s.end(), s.matched

    text, matched = run(tokens)
    assert text == shown + (matched if include and matched else "")
    whole = "".join(tokens)
    assert run([whole]) == run(list(whole)) == (text, matched)


def test_streams_end_the_same_however_tokens_arrive(bpe):
    rng = random.Random(2)
    for _ in range(200):
        text = "".join(rng.choices(["a", "b", ",", " ", "é", "stop", "🤖"], k=20))
        ids = bpe.encode(text, special=False)
        stop = rng.choices(["a,", "b é", "stop", ", ", "🤖a", "éé"], k=2)
        s, whole = TextStream(bpe, stop=stop), TextStream(bpe, stop=stop)
        got = "".join(s.push(p) for p in pieces(rng, ids)) + s.end()
        assert got == whole.push(ids) + whole.end() and s.stopped == whole.stopped
        ends = [text.find(x) + len(x) for x in stop if x in text]
        assert (s.stopped is None) == (not ends)
        if ends:
            assert got == text[: min(ends) - len(s.stopped)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("token", ["<|end|>", ","])
def test_the_text_of_a_stop_token_is_shown_by_flag_and_eos_the_same(bpe, include, token):
    s = TextStream(bpe, include_stop=include)
    text = s.push(bpe.encode("the cat", special=False)) + s.end(bpe.inner.token_to_id(token))
    assert text == "the cat" + (token if include else "")


def test_an_unfinished_character_is_shown_at_the_end(bpe):
    ids = [bpe.inner.token_to_id(c) for c in "ðŁ"]   # two of the four bytes of an emoji
    s = TextStream(bpe, stop=["zz"])
    assert s.push(ids) == "" and s.end() == bpe.decode(ids) == "\ufffd"


def test_min_tokens_cannot_complete_a_stop_string(bpe):
    ids = bpe.encode("a,b", special=False) + bpe.encode("a,b", special=False)
    n = len(ids) // 2
    s = TextStream(bpe, stop=["a,b"], min_tokens=n)
    assert "".join(s.push([i]) for i in ids) == "a,b" and s.stopped == "a,b"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError):
        StopStrings(["a", ""])


def test_a_tokenizer_loads_as_transformers_loads_it(tmp_path, bpe):
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.json").write_text(bpe.inner.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<s>",
    }))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*CORPUS, "<|end|> x <think>"]:
        assert bpe.encode(text, special=True) == theirs(text)["input_ids"]
        assert bpe.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"]
