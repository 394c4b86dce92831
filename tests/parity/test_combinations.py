"""Options in all pairs on tiny models and four chips: what `check` accepts runs and gives the baseline's tokens, what
it refuses is refused by a run with the same words, before weights are made; nothing else happens (I05).

The baseline is the cpu chip in the same dtype with reference bodies, no program and one step in flight.  A token may
differ only where the baseline's two best logits are closer than MARGIN: twice the largest difference of any logit that
was seen between float32 and these dtypes with reference bodies on these models (0.04 and 0.005), rounded up.
"""

import itertools
from typing import Any

import numpy as np
import pytest

import afl
from afl.errors import ConfigError, violations
from afl.run.preflight import Source, check

SIZES = dict(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=96, vocab_size=128, max_position_embeddings=256, tie_word_embeddings=False,
)
MODELS = {"llama": ("LlamaForCausalLM", SIZES), "qwen3": ("Qwen3ForCausalLM", SIZES),
          "heads of 12": ("LlamaForCausalLM", SIZES | {"head_dim": 12})}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS), "chip": ("310p", "a2", "a3", "a5"), "dtype": ("auto", "float16", "bfloat16", "float32"),
    "weights": ("auto", "float16", "int8"), "block_tokens": (0, 128, 64, 48), "max_model_len": (0, 100, 300),
    "steps": ((4, 8), (2, 40), (1, 1)), "kv_blocks": (0, 2), "depth": (1, 2), "eager": (False, True),
    "checked": (False, True), "prefix_cache": (True, False), "policy": ("fcfs", "recompute", "priority"),
    "references": (False, True),
}
GOOD = {n: v[:1] if n in ("weights",) else v for n, v in OPTIONS.items()} | {
    "model": ("llama", "qwen3"), "dtype": ("auto", "float16"), "block_tokens": (0, 128), "max_model_len": (0, 100)}
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12, 13, 14], [5, 6, 7, 8]]
NEW = 6
MARGIN = {"bfloat16": 0.1, "float16": 0.01}


def covering(options: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows in which every two values of two options occur together; greedy, the same at every call."""
    names = list(options)
    left = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2)
            for i in range(len(options[a])) for j in range(len(options[b]))}
    rng, rows = np.random.default_rng(4), []

    def fresh(row: dict[str, int]) -> set[Any]:
        return left & set(itertools.combinations(((n, row[n]) for n in names if n in row), 2))

    while left:
        (a, i), (b, j) = min(left)
        row = {a: i, b: j}
        for n in rng.permutation([n for n in names if n not in row]).tolist():
            row[n] = max(range(len(options[n])), key=lambda k: len(fresh(row | {n: k})))  # noqa: B023
        left -= fresh(row)
        rows.append({n: options[n][row[n]] for n in names})
    return rows


def given(row: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Architecture, config.json and engine options of a row."""
    name, settings = MODELS[row["model"]]
    rows, tokens = row["steps"]
    rest = {n: v for n, v in row.items() if n not in ("model", "steps")}
    return name, settings, rest | {"max_seqs": rows, "max_step_tokens": tokens, "threads": 1}


ROWS = covering(OPTIONS)
RUN = covering(GOOD)


def label(row: dict[str, Any]) -> str:
    return "-".join(str(v) for v in row.values())


@pytest.fixture(scope="module")
def baseline() -> Any:
    """(model, dtype) -> for each prompt tokens and the two best log-probabilities, by reference bodies."""
    made: dict[Any, Any] = {}

    def get(model: str, dtype: str) -> Any:
        if (model, dtype) not in made:
            m = afl.random_model(
                *MODELS[model], chip="cpu", dtype=dtype, references=True, eager=True, depth=1, threads=1
            )
            made[model, dtype] = m.generate(PROMPTS, max_tokens=NEW, ignore_eos=True, logprobs=2)
        return made[model, dtype]

    return get


def test_the_rows_hold_every_pair():
    for options, rows in ((OPTIONS, ROWS), (GOOD, RUN)):
        for a, b in itertools.combinations(options, 2):
            seen = {(r[a], r[b]) for r in rows}
            assert seen == set(itertools.product(options[a], options[b])), (a, b)
        assert len(rows) < 60


@pytest.mark.parametrize("row", [*ROWS, *RUN], ids=label)
def test_what_check_accepts_runs_and_what_it_refuses_is_refused_with_its_words(row, baseline):
    name, settings, options = given(row)
    report = check(Source(settings | {"architectures": [name]}, "", "here"), **options)
    if not report.supported:
        with pytest.raises(ConfigError) as e:
            afl.random_model(name, settings, **options).engine()
        assert str(e.value) == violations("options that do not hold", map(str, report.violations))
        return
    model = afl.random_model(name, settings, **options)
    want = baseline(row["model"], report.dtype)
    for w, got in zip(want, model.generate(PROMPTS, max_tokens=NEW, ignore_eos=True), strict=True):
        assert len(got.token_ids) == NEW
        for i, (a, b) in enumerate(zip(w.token_ids, got.token_ids, strict=True)):
            if a != b:
                assert gap(w, i) < MARGIN[report.dtype], (row, i)
                break


def gap(completion: Any, i: int) -> float:
    """Difference of the two best logits at one place."""
    best = sorted((p for _, p in completion.logprobs[i].top), reverse=True)
    return best[0] - best[1]


def test_most_rows_of_the_array_say_something():
    """Neither outcome is rare, so that the test above cannot pass for the want of either."""
    verdicts = []
    for row in ROWS + RUN:
        name, settings, options = given(row)
        verdicts.append(check(Source(settings | {"architectures": [name]}, "", "here"), **options).supported)
    assert sum(verdicts) >= 10 and verdicts.count(False) >= 10, verdicts
