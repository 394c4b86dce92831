"""Logits equal to transformers' on tiny random checkpoints, whatever way the tokens are cut into steps."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import afl
from afl.run.pack import batch_of

TOL = 1e-4
COMMON = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, vocab_size=97, max_position_embeddings=512)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
CONFIGS = {
    "llama_untied": (LlamaForCausalLM, LlamaConfig(num_attention_heads=6, num_key_value_heads=2, **COMMON)),
    "llama_tied": (
        LlamaForCausalLM,
        LlamaConfig(num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=True, **COMMON),
    ),
    "llama3_rope": (
        LlamaForCausalLM,
        LlamaConfig(num_attention_heads=6, num_key_value_heads=1, rope_parameters=LLAMA3, **COMMON),
    ),
    "llama_linear_rope": (
        LlamaForCausalLM,
        LlamaConfig(
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
            **COMMON,
        ),
    ),
    "llama_yarn": (
        LlamaForCausalLM,
        LlamaConfig(
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64),
            **COMMON,
        ),
    ),
    "llama_biases": (
        LlamaForCausalLM,
        LlamaConfig(num_attention_heads=6, num_key_value_heads=2, attention_bias=True, mlp_bias=True, **COMMON),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(num_attention_heads=6, num_key_value_heads=3, head_dim=16, **COMMON)),
    # C05: heads whose channels do not divide the hidden size
    "head_dim": (
        Qwen3ForCausalLM,
        Qwen3Config(
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=128,
            tie_word_embeddings=True,
            **{**COMMON, "hidden_size": 56},
        ),
    ),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request, tmp_path_factory):
    """(afl model loaded from the saved folder, transformers model)."""
    cls, config = CONFIGS[request.param]
    torch.manual_seed(1)
    peer = cls(config).eval()
    with torch.no_grad():
        for name, p in peer.named_parameters():
            if p.ndim == 1:  # norms start at one and biases at zero: make mistakes visible
                p.add_(torch.randn_like(p) * 0.3)
            elif "embed" not in name:
                p.mul_(3.0)
    folder = tmp_path_factory.mktemp(request.param)
    peer.save_pretrained(folder)
    return afl.load(folder), peer


def feed(model, state, rows, tables, block_tokens):
    """One step; rows: list of (row, tokens so far, new ids).  Returns (state, logits)."""
    ids = np.concatenate([new for _, _, new in rows])
    position = np.concatenate([np.arange(at, at + len(new)) for _, at, new in rows])
    of = np.concatenate([np.full(len(new), i) for i, (_, _, new) in enumerate(rows)])
    table = np.stack([tables[row] for row, _, _ in rows])
    slot = table[of, position // block_tokens] * block_tokens + position % block_tokens
    q_start = np.cumsum([0, *(len(new) for _, _, new in rows)])
    kv_len = np.array([at + len(new) for _, at, new in rows])
    batch = batch_of(ids, position, slot, q_start, kv_len, table, np.array([row for row, _, _ in rows]))
    return model.step(model.params, state, batch)


def tables_for(rows, blocks_each):
    """A table per row, blocks shuffled so that neighbours in a row are not neighbours in the pool."""
    order = np.random.default_rng(5).permutation(rows * blocks_each) + 1
    return order.reshape(rows, blocks_each).astype(np.int32)


def truth(peer, ids):
    with torch.inference_mode():
        return peer(torch.from_numpy(ids)[None].long()).logits[0]


@pytest.mark.parametrize("chunk", (1, 2, 7, 40))
def test_prefill_in_chunks_equals_transformers(pair, chunk):
    model, peer = pair
    ids = np.random.default_rng(chunk).integers(0, 97, 40)
    want = truth(peer, ids)
    state, tables = model.init_state(blocks=12, block_tokens=4, rows=1), tables_for(1, 12)
    for at in range(0, 40, chunk):
        state, got = feed(model, state, [(0, at, ids[at : at + chunk])], tables, 4)
        end = min(at + chunk, 40) - 1
        assert (got[0] - want[end]).abs().max() < TOL


def test_long_prefill_then_decode_equals_transformers(pair):
    model, peer = pair
    ids = np.random.default_rng(9).integers(0, 97, 300)
    want = truth(peer, ids)
    state, tables = model.init_state(blocks=20, block_tokens=16, rows=1), tables_for(1, 20)
    state, got = feed(model, state, [(0, 0, ids[:290])], tables, 16)
    assert (got[0] - want[289]).abs().max() < TOL
    for at in range(290, 300):
        state, got = feed(model, state, [(0, at, ids[at : at + 1])], tables, 16)
        assert (got[0] - want[at]).abs().max() < TOL


@pytest.mark.parametrize("rows", range(1, 10))
def test_ragged_batches_equal_transformers(pair, rows):
    """Rows of different lengths, prefilling and decoding side by side."""
    model, peer = pair
    rng = np.random.default_rng(rows)
    texts = [rng.integers(0, 97, n) for n in rng.integers(2, 33, rows)]
    want = [truth(peer, t) for t in texts]
    state, tables = model.init_state(blocks=9 * rows, block_tokens=4, rows=rows), tables_for(rows, 9)
    done = [0] * rows
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        work = []
        for i in rng.permutation(rows):
            n = min(int(rng.choice([0, 1, 1, 3, 8])), len(texts[i]) - done[i])
            if n:
                work.append((int(i), done[i], texts[i][done[i] : done[i] + n]))
        if not work:
            continue
        state, got = feed(model, state, work, tables, 4)
        for j, (i, at, new) in enumerate(work):
            done[i] = at + len(new)
            assert (got[j] - want[i][done[i] - 1]).abs().max() < TOL


def test_padding_content_does_not_reach_real_rows(pair):
    """Two fillings of one padded shape give bitwise equal real rows."""
    from afl.run.pack import pad
    from afl.tree import evolve

    model, _ = pair
    ids = np.random.default_rng(2).integers(0, 97, 11)
    tables = tables_for(2, 5)
    state = model.init_state(blocks=10, block_tokens=4, rows=2)
    state, _ = feed(model, state, [(0, 0, ids[:6]), (1, 0, ids[6:10])], tables, 4)
    position = np.array([6, 4])
    slot = tables[[0, 1], position // 4] * 4 + position % 4
    batch = batch_of(ids[[3, 4]], position, slot, np.array([0, 1, 2]), position + 1, tables, np.array([0, 1]))
    seen = []
    for fill in (0, 96):
        padded = pad(batch, 7, 5, 6, fill=fill)
        padded = evolve(padded, position=torch.where(padded.slot[0] < 0, fill * 3, padded.position).to(torch.int32))
        _, got = model.step(model.params, state, padded)
        seen.append(got[:2])
    assert torch.equal(*seen)
