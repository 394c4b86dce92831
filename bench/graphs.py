"""Host cost of one captured decode step beside the same step as a program: chip a3 emulated, 32 layers, 256 rows.

An emulated graph replays operator by operator, which a device does not: `host part` is a captured step whose replay is
left out, so staging of the inputs, the lists of 256 lengths for 32 attentions, and handing them to the graph.  With
torch_npu each of the 32 calls is then issued once more; that part is not in these figures.
"""

import json
import sys

import numpy as np
import torch
from machine import median_us, require_idle

LAYERS, ROWS = 32, 256
SETTINGS = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=4096,
)


def main() -> None:
    """Print the figures; `--json` prints them once more as JSON."""
    from afl import tree
    from afl.device_fake import FakeDriver
    from afl.ir.capture import Arena, Pool, arena_bytes, capture, stage
    from afl.ops.kernels import fia
    from afl.run.load import random_model
    from afl.run.memory import Pool as CachePool
    from afl.run.pack import batch_of, fills_of, leaves_of
    from afl.run.programs import greedy_program

    torch.set_num_threads(1)
    require_idle()
    m = random_model("LlamaForCausalLM", SETTINGS, chip="a3", max_seqs=ROWS)
    bound = greedy_program(m, CachePool(1 + ROWS, 128, 0, 128, "")).program(tokens=ROWS, rows=ROWS, width=1)
    state = [torch.zeros(t.shape, dtype=t.dtype) for t in tree.leaves(m.state_types(1 + ROWS, 128, ROWS))]
    kv = 20 + np.arange(ROWS, dtype=np.int32) % 90
    blocks = 1 + np.arange(ROWS, dtype=np.int32).reshape(ROWS, 1)
    row = np.arange(ROWS + 1, dtype=np.int32)
    batch = leaves_of(batch_of(row[:-1] % 200, kv - 1, blocks[:, 0] * 128 + kv - 1, row, kv, blocks, row[:-1].copy()))
    driver = FakeDriver()

    def host_part() -> None:
        fia._lengths.cache_clear()      # every step has lengths of its own
        c.graph.update(c.host_values(stage(arena, c.places, batch)))

    with torch.inference_mode():
        arena = Arena(driver, arena_bytes(bound.program), 2)
        c = capture(bound, state, arena, fills_of(1), driver, Pool(driver.pool()))
        figures = {
            "program_us": median_us(lambda: bound(*state, *batch), n=9, warm=2),
            "replayed_us": median_us(lambda: c.run(batch), n=9, warm=2),
            "host_part_us": median_us(host_part, 100, 10),
        }
    print(f"a step as a program {figures['program_us']:.0f} us, in an emulated graph {figures['replayed_us']:.0f} us, "
          f"of it host part {figures['host_part_us']:.0f} us   ({len(c.graph.calls)} calls, {len(c.renewals)} renewed)")
    if "--json" in sys.argv:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
