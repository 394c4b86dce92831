"""Host cost of one decode step: events in, schedule, pack, program, commit, outputs out.  32 layers, 256 rows.

Target: median under 300 us plus 0.25 us per equation; tracing plus planning of 32 layers under 150 ms.
"""

import json
import sys
import time

import torch
from machine import median_us, require_idle
from null_chip import null_chip

LAYERS, ROWS, PROMPT = 32, 256, 8
SETTINGS = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=4096,
)


def engine(seeded: bool):
    from afl.run.load import random_model
    from afl.run.sampling import SamplingParams

    m = random_model("LlamaForCausalLM", SETTINGS, chip="null", max_seqs=ROWS, max_step_tokens=4096, depth=2)
    e = m.engine()
    for i in range(ROWS):
        params = SamplingParams(max_tokens=3000, temperature=0.8 if seeded else 0.0, seed=i if seeded else None)
        e.submit([1 + i % 7] * PROMPT, params)
    for _ in range(3):
        e.step()
    return e


def main() -> None:
    torch.set_num_threads(2)
    require_idle()
    null_chip(ROWS)
    rows = {}
    for seeded in (False, True):
        name = "seeded" if seeded else "greedy"
        a = time.perf_counter()
        e = engine(seeded)
        first = time.perf_counter() - a
        jitted = e.sampled if seeded else e.greedy
        equations = len(jitted.programs()[0].graph.eqns)
        blocks = sorted(median_us(e.step, n=200, warm=20) for _ in range(7))
        step, quiet = blocks[3], blocks[0]
        budget = 300 + 0.25 * equations
        rows[name] = {"step_us": step, "quietest_us": quiet, "equations": equations, "budget_us": budget}
        print(
            f"{name:7} step {step:7.1f} us (quietest of 7 blocks of 200: {quiet:.1f})   {equations} equations, "
            f"budget {budget:.0f} us   {'ok' if step < budget else 'OVER'}   (first steps {first * 1e3:.0f} ms)"
        )
    rows["trace_plan_ms"] = trace_plan()
    print(f"trace + plan + generate, {LAYERS} layers, one size: {rows['trace_plan_ms']:.1f} ms (budget 150)")
    if "--json" in sys.argv:
        print(json.dumps(rows))


def trace_plan() -> float:
    from afl.ir.program import compile_graph
    from afl.ir.trace import trace
    from afl.ops.fusions import RULES
    from afl.run.load import random_model

    m = random_model("LlamaForCausalLM", SETTINGS, chip="null")
    args = m.params, m.state_types(64, 16, 8), m.batch_types(8, 8)

    def once() -> None:
        g = trace(m.step, *args, tags=("param", "state", "batch"))
        compile_graph(g, m.chip, donate=("state",), rules=RULES)

    return median_us(once, n=15, warm=2) / 1e3


if __name__ == "__main__":
    main()
