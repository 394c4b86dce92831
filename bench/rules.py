"""What each rewrite rule of the cpu chip is worth: a decode step with all rules against one without that rule.

A rule stays on by default only if it saves 2 % or more.   python bench/rules.py [--rounds 9]
"""

import argparse
import time

import torch
from machine import interleaved, require_idle

SMALL = dict(
    hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=6,
    vocab_size=4096, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip
SMOL = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=9)
    ap.add_argument("--busy-ok", action="store_true")
    a = ap.parse_args()
    torch.set_num_threads(2)
    require_idle()
    from afl.ops.fusions import RULES
    from afl.run.load import random_model

    for name, sizes in (("15 M", SMALL), ("135 M", SMOL)):
        m = random_model("LlamaForCausalLM", sizes)
        for rows in (1, 8):
            full = step(m, rows, RULES)
            for rule in RULES:
                without = step(m, rows, tuple(r for r in RULES if r is not rule))
                us = interleaved({"with": full, "without": without}, a.rounds)
                saved = 1 - us["with"] / us["without"]
                figures = f"{us['without']:9.1f} -> {us['with']:9.1f} us   {saved:+.1%}"
                print(f"{name:6} batch {rows}: {rule.name:16} {figures}")


def step(m, rows: int, rules):
    """Microseconds of one decode step at a context of 192 tokens, as a function to call."""
    import numpy as np

    from afl import tree
    from afl.ir.program import compile_graph
    from afl.ir.trace import trace
    from afl.run.pack import batch_of

    state = m.init_state(blocks=12 * rows, block_tokens=16, rows=rows)
    table = np.arange(1, 12 * rows + 1).reshape(rows, 12)
    ones, at = np.arange(rows + 1), np.full(rows, 191)
    batch = batch_of(at * 0 + 5, at, table[:, 11] * 16 + 15, ones, at + 1, table, ones[:-1])
    traced = trace(m.step, m.params, state, batch, tags=("param", "state", "batch"))
    program = compile_graph(traced, m.chip, donate=("state",), rules=rules).bind(tree.leaves(m.params))
    inputs = [*tree.leaves(state), *tree.leaves(batch)]

    def once() -> float:
        with torch.inference_mode():
            a = time.perf_counter()
            for _ in range(5):
                program(*inputs)
            return (time.perf_counter() - a) * 2e5

    return once


if __name__ == "__main__":
    main()
