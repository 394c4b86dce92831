"""Decode speed on the host: tokens/s of afl and of transformers' generate on the same float32 weights, in turns.

Floors: bytes of weights and cache per step over the measured read bandwidth; and the bare linears of one step.
Targets: 1.3x at batch 1, 1.15x at batch 8.   python bench/decode.py [--rounds 5] [--new 64] [--batches 1,8]
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from machine import interleaved, median_us, read_bandwidth, require_idle

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from peers import as_transformers  # noqa: E402

from afl.ir.kernel import choose  # noqa: E402
from afl.ops.linear import linear  # noqa: E402
from afl.types import type_of  # noqa: E402


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--model", default="smollm2")
    ap.add_argument("--prompt", type=int, default=128)
    ap.add_argument("--new", type=int, default=48)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--batches", default="1,8")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--busy-ok", action="store_true")
    ap.add_argument("--json", action="store_true")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    require_idle()
    from afl.run.load import load

    m = load(a.model, dtype="float32", threads=a.threads)
    peer = as_transformers(m)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, weights {m.param_bytes / 1e6:.0f} MB")
    rows = []
    for n in map(int, a.batches.split(",")):
        prompts = torch.randint(100, m.c.v - 100, (n, a.prompt), generator=torch.Generator().manual_seed(n))
        require_idle()
        speed = interleaved(
            {"afl": lambda p=prompts: ours(m, p, a.new), "transformers": lambda p=prompts: theirs(peer, p, a.new)},
            a.rounds,
        )
        cache = n * (a.prompt + a.new / 2) * sum(s.block_bytes(1, m.dtype) for s in m.caches)
        floor = n / ((m.param_bytes + cache) / bandwidth)
        linears = n / (bare_linears_us(m, n) / 1e6)
        ratio = speed["afl"] / speed["transformers"]
        rows.append({"batch": n, **speed, "ratio": ratio, "bandwidth_floor": floor, "linears_floor": linears})
        print(
            f"batch {n:3}: afl {speed['afl']:7.1f} tok/s   peer {speed['transformers']:7.1f}   ratio {ratio:.2f}"
            f"   floors: bandwidth {floor:.1f} ({speed['afl'] / floor:.0%}), "
            f"bare linears {linears:.1f} ({speed['afl'] / linears:.0%})"
        )
    if a.json:
        print(json.dumps(rows))


def ours(m, prompts: torch.Tensor, new: int) -> float:
    """Tokens/s of the decode phase, the engine's whole loop included."""
    from afl.run.sampling import SamplingParams

    e = m.engine(max_seqs=len(prompts), max_step_tokens=4096, max_model_len=prompts.shape[1] + new + 1)
    for p in prompts.tolist():
        e.submit(p, SamplingParams(max_tokens=new, ignore_eos=True))
    got = 0
    while got < len(prompts):
        got += len(e.step().outputs)
    a, first = time.perf_counter(), got
    while e.busy:
        got += len(e.step().outputs)
    return (got - first) / (time.perf_counter() - a)


def theirs(peer, prompts: torch.Tensor, new: int) -> float:
    """Tokens/s of the decode phase: generate of `new` tokens minus that of one."""

    def run(k: int) -> float:
        a = time.perf_counter()
        with torch.inference_mode():
            peer.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=k,
                min_new_tokens=k,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - a

    one = run(1)
    return len(prompts) * (new - 1) / (run(new) - one)


def bare_linears_us(m, n: int) -> float:
    """The matrix products of one step and nothing else, by the kernels that the chip's programs use."""
    work = []
    for layer in m.params.layers:
        work += [(torch.randn(n, d.w.shape[1]), d.w) for d in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    work.append((torch.randn(n, m.c.d), m.params.embed if m.params.head is None else m.params.head))

    kernels = [choose(linear, (type_of(x), type_of(w), None), (), m.chip).fn for x, w in work]

    def once() -> None:
        for (x, w), fn in zip(work, kernels, strict=True):
            fn(x, w, None)

    return median_us(once, n=10, warm=2)


if __name__ == "__main__":
    main()
