"""Bug log, part B: sampling, log-probabilities, stopping and text, through the engine.  Ids are those of the log."""

import json
import shutil

import attrs
import numpy as np
import pytest
import tiny
import torch
from transformers import LlamaForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import afl
from afl.errors import RequestError
from afl.run.generate import stream
from afl.run.sampling import SamplingParams

PROMPT = [5, 1, 9, 2, 7, 3, 8, 4, 6]
HOT = {"temperature": 1.5, "max_tokens": 12}


def one(model, prompt=PROMPT, options=None, **sampling):
    return model.generate([prompt], options=options, **sampling)[0]


def test_b02_top_k_extremes_are_the_unrestricted_distribution(model):
    runs = [[one(model, top_k=k, seed=s, **HOT).token_ids for s in range(3)] for k in (-1, 0, 61, 610)]
    assert all(r == runs[0] for r in runs)
    greedy = one(model, max_tokens=12).token_ids
    assert all(tokens != greedy for tokens in runs[0]) and len(set(runs[0])) == 3


def test_b03_top_p_just_below_one_is_off_beside_a_row_that_cuts(settings, serve):
    wide = afl.random_model("LlamaForCausalLM", settings | {"vocab_size": 32_000, "num_hidden_layers": 1}, seed=3)
    how = {"seed": 8, **HOT}
    got = serve(wide.engine(), {"a": (PROMPT, {"top_p": 0.9999999, **how}), "b": (PROMPT, {"top_p": 0.9, **how})})
    assert tuple(got["a"][0]) == one(wide, **how).token_ids
    assert tuple(got["b"][0]) == one(wide, top_p=0.9, **how).token_ids


@pytest.mark.parametrize("cold", [-1, 0.0])
def test_b04_a_greedy_row_with_banned_tokens_beside_a_random_row(model, serve, cold):
    banned = tuple((i,) for i in range(60) if i % 7)
    requests = {
        "greedy": (PROMPT, {"temperature": cold, "bad_words_ids": banned, "max_tokens": 9}),
        "random": (PROMPT, {"temperature": 1.0, "seed": 3, "max_tokens": 9}),
    }
    with np.errstate(all="raise"):
        got = serve(model.engine(), requests)
        checked = serve(model.engine(checked=True), requests)
    assert got == checked and {t % 7 for t in got["greedy"][0] if t != 60} == {0}
    assert tuple(got["random"][0]) == one(model, temperature=1.0, seed=3, max_tokens=9).token_ids


def test_b05_a_seeded_request_ignores_company_order_and_padding(model, capturing, serve):
    want = list(one(model, seed=42, **HOT).token_ids)
    mine, others = {"mine": (PROMPT, {"seed": 42, **HOT})}, {str(i): ([i, 2], HOT) for i in range(4)}
    captures = attrs.evolve(model, chip=capturing)
    for it, options in ((model, {}), (captures, {"max_seqs": 8}), (model, {"depth": 1}), (model, {"seed": 9})):
        for requests in ({**mine, **others}, {**others, **mine}, mine):
            assert serve(it.engine(max_step_tokens=64, max_model_len=64, **options), requests)["mine"][0] == want


def test_b05_two_runs_of_the_command_line_agree(llama, cli):
    given = ("run", "--model", llama, "the cat", "--json", "--seed", 42, "--temperature", 1.5, "--max-tokens", 9)
    a, b = (json.loads(cli(*given).stdout)["token_ids"] for _ in range(2))
    assert a == b


def test_b06_penalties_see_the_token_just_emitted(llama, text_model):
    """Depth 2 equals depth 1 equals a loop around the field's own processor."""
    peer, penalise = LlamaForCausalLM.from_pretrained(llama).eval(), RepetitionPenaltyLogitsProcessor(1.3)
    for prompt in ([5, 6, 7], [11, 12], [40, 41, 42, 43]):
        context = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(20):
                logits = penalise(context, peer(context).logits[:, -1].float())
                context = torch.cat([context, logits.argmax(-1, keepdim=True)], 1)
        want = context[0, len(prompt):].tolist()
        how = {"repetition_penalty": 1.3, "max_tokens": 20, "ignore_eos": True}
        got = {d: list(one(text_model, prompt, {"depth": d}, **how).token_ids) for d in (1, 2, 3)}
        assert got[1] == got[2] == got[3] == want


def test_b06_a_penalty_breaks_a_loop_that_the_logits_favour(model):
    favour = {"logit_bias": {7: 100.0, 8: 95.0, 9: 90.0}, "max_tokens": 6}
    assert one(model, [1], **favour).token_ids == (7,) * 6
    for depth in (1, 2):
        got = one(model, [1], {"depth": depth}, repetition_penalty=1.3, **favour).token_ids
        assert got[:3] == (7, 8, 9), "the penalty of a token must hold for the very next one"


def test_b09_a_bias_outside_the_vocabulary_is_refused_and_others_finish(model, serve):
    engine = model.engine()
    engine.submit([1, 2], SamplingParams(max_tokens=5), "before")
    with pytest.raises(RequestError, match="191222"):
        engine.submit([1, 2], SamplingParams(logit_bias={191_222: 5.0}), "wrong")
    want = one(model, [1, 2], max_tokens=5).token_ids
    assert tuple(serve(engine, {"after": ([1, 2], {"max_tokens": 5})})["after"][0]) == want
    assert not engine.live and not engine.busy


def test_b10_logprobs_zero_is_the_sampled_token_alone_and_none_is_off(model):
    assert one(model, max_tokens=4).logprobs is None
    bare, whole = one(model, max_tokens=4, logprobs=0), one(model, max_tokens=4, logprobs=-1)
    assert [t.top for t in bare.logprobs] == [()] * 4
    for a, b, token in zip(bare.logprobs, whole.logprobs, bare.token_ids, strict=True):
        assert a.token == token and a.logprob == pytest.approx(dict(b.top)[token], abs=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", range(1, 10))
def test_b12_chunks_of_a_prompt_draw_nothing_and_touch_no_penalty(model, chunk, depth):
    how = {"seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "logprobs": 0, **HOT}
    want = one(model, **how)
    got = one(model, options={"max_step_tokens": chunk, "max_seqs": 1, "depth": depth}, **how)
    assert got.token_ids == want.token_ids and len(got.logprobs) == len(got.token_ids)


def test_b13_every_end_token_is_held_back_for_min_tokens(model):
    favour = {"logit_bias": {7: 100.0, 2: 90.0}, "max_tokens": 12}
    ends = attrs.evolve(model, eos_ids=(2, 7))
    assert one(ends, **favour).token_ids == (7,)
    for depth in (1, 2):
        got = one(ends, options={"depth": depth}, min_tokens=5, **favour)
        assert len(got.token_ids) == 6 and not {2, 7} & set(got.token_ids[:5]) and got.token_ids[5] == 7
        assert got.finish_reason == "stop"


@pytest.mark.parametrize("generation", [106, [1, 106]])
def test_b14_the_stop_set_is_the_union_of_all_sources(llama, cli, tmp_path, generation):
    copy = shutil.copytree(llama, tmp_path / "model")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | {"eos_token_id": 50}))
    end = tiny.tokenizer().token_to_id("<|end|>")
    model = afl.load(copy)
    assert set(model.eos_ids) == {50, 106, end} | ({1} if generation == [1, 106] else set())
    for id in model.eos_ids:
        done = one(model, [5, 6], logit_bias={id: 100.0}, max_tokens=5)
        assert (done.token_ids, done.finish_reason) == ((id,), "stop")
        shown = cli("run", "--model", copy, "x", "--json", "--max-tokens", 5, "--logit-bias", f"{id}:100")
        assert json.loads(shown.stdout)["token_ids"] == [id]


def test_b16_ignore_eos_ignores_all_of_them_but_no_stop_string(text_model):
    bpe = tiny.tokenizer()
    a, b = bpe.token_to_id("a"), bpe.token_to_id("b")
    ends = attrs.evolve(text_model, eos_ids=(a, b))
    favour = {"logit_bias": {a: 100.0, b: 99.99}, "max_tokens": 8}
    assert len(one(ends, [5], **favour).token_ids) == 1
    free = one(ends, [5], ignore_eos=True, **favour)
    assert len(free.token_ids) == 8 and free.finish_reason == "length" and set(free.token_ids) <= {a, b}
    stopped = one(ends, [5], ignore_eos=True, stop=(free.text[:3],), **favour)
    assert (stopped.finish_reason, stopped.text) == ("stop", "") and len(stopped.token_ids) == 3
    assert len(one(ends, [5], ignore_eos=True, stop_ids=(free.token_ids[0],), **favour).token_ids) == 1


class Counted:
    """An engine whose tokens are one character each; `held` are the characters not shown, before each step."""

    def __init__(self, engine):
        self.engine, self.shown, self.delivered, self.held = engine, 0, 0, []

    def step(self):
        self.held.append(self.delivered - self.shown)
        result = self.engine.step()
        self.delivered += int((result.outputs.tokens >= 0).sum())
        return result

    def __getattr__(self, name):
        return getattr(self.engine, name)


@pytest.mark.parametrize("depth", [1, 2])
def test_b17_streamed_text_is_the_whole_text_and_holds_back_no_more_than_it_must(text_model, depth):
    bpe = tiny.tokenizer()
    word = [bpe.token_to_id(c) for c in "abc"]
    how = {"logit_bias": {t: 100.0 for t in word}, "temperature": 5.0, "max_tokens": 40, "ignore_eos": True}
    for seed in range(6):
        whole = one(text_model, [5], seed=seed, **how)
        assert set(whole.text) <= set("abc") and len(whole.text) == 40
        for stop in (("bca",), ("abc", "ccb"), ("abcabcabc",)):
            engine, text, done = Counted(text_model.engine(depth=depth)), "", None
            for piece in stream(engine, [[5]], SamplingParams(stop=stop, seed=seed, **how)):
                text += piece.text
                engine.shown = len(text)
                assert whole.text.startswith(text)
                done = piece.done or done
            found = [whole.text.index(s) + len(s) for s in stop if s in whole.text]
            cut = next((whole.text[: min(found) - len(s)] for s in stop if whole.text[: min(found)].endswith(s)),
                       None) if found else None
            assert text == done.text == (whole.text if cut is None else cut)
            live = engine.held[: len(done.token_ids)]      # after a match nothing more is shown
            assert max(live) <= max(map(len, stop)) - 1 and len(live) > 2
            assert done.finish_reason == ("length" if cut is None else "stop")
            assert one(text_model, [5], stop=stop, seed=seed, **how).text == text


@pytest.mark.parametrize("eos", [True, False], ids=["eos", "stop id"])
def test_b18_the_text_of_the_token_that_stops_shows_by_flag(text_model, eos):
    bpe = tiny.tokenizer()
    a = bpe.token_to_id("a")
    model = attrs.evolve(text_model, eos_ids=(a,) if eos else ())
    how = {"logit_bias": {a: 100.0}, "max_tokens": 5, **({} if eos else {"stop_ids": (a,)})}
    hidden, shown = one(model, [5], **how), one(model, [5], include_stop=True, **how)
    assert hidden.token_ids == shown.token_ids == (a,) and hidden.finish_reason == shown.finish_reason == "stop"
    assert (hidden.text, shown.text) == ("", "a")
    assert (hidden.stop_reason, shown.stop_reason) == ((None, None) if eos else (a, a))


def test_b18_a_special_end_token_shows_by_flag_too(text_model):
    end = tiny.tokenizer().token_to_id("<|end|>")
    how = {"logit_bias": {end: 100.0}, "max_tokens": 5}
    assert [one(text_model, [5], include_stop=i, **how).text for i in (False, True)] == ["", "<|end|>"]


@pytest.mark.parametrize("empty", ["", []])
def test_b21_an_empty_prompt_is_refused_and_the_engine_lives(text_model, cli, llama, serve, empty):
    with pytest.raises(RequestError, match="empty"):
        text_model.generate([empty])
    engine = text_model.engine()
    with pytest.raises(RequestError, match="empty"):
        engine.submit([], SamplingParams())
    assert serve(engine, {"next": ([5], {"max_tokens": 2, "ignore_eos": True})})["next"][1] == "length"
    for given in ([""], ["--prompt-ids", ""], ["", "--no-chat"]):
        result = cli("run", "--model", llama, *given)
        assert result.exit_code == 2 and "empty" in result.stderr and not result.stdout
