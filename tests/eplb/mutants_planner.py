"""Seeded bugs in load windows, placements, forecasts, local search and policies: each must make tests of its part fail.

A bug is a replacement of text in one file of a copy of the package.  `python tests/eplb/mutants_planner.py` prints the
score; `test_mutants_planner.py` runs it, too.  The loops run uncompiled, so that a copy need not be compiled.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = {
    "load": "values", "values": "values", "metrics": "traces", "traces": "traces", "forecast": "forecast",
    "exchange": "exchange policies", "loops": "exchange policies", "problem": "exchange policies",
    "policies/afl": "exchange policies", "policies/flash": "exchange policies", "policies/greedy": "policies",
    "policies/swift": "policies",
}
MUTANTS = [
    # load windows and placements
    ("load", "np.arange(self.end, self.end + len(x)) // self.block_steps", "np.arange(len(x)) // self.block_steps",
     "blocks begin with each call"),
    ("load", "self.ewma_sum * self.decay**later.steps + later.ewma_sum", "self.ewma_sum + later.ewma_sum",
     "merging does not age the average"),
    ("load", "open_block = blocks and self.end % self.block_steps", "open_block = False", "no block is shared"),
    ("load", "keep = size == self.block_steps if", "keep = size >= 0 if", "short blocks count like whole ones"),
    ("load", "[-self.capacity:]", "[:self.capacity]", "the oldest blocks are kept"),
    ("values", "short = -x.shape[1] % ranks", "short = 0", "uneven placements are not padded"),
    ("values", "real[longer:, -1] = False", "real[:longer, -1] = False", "the wrong ranks are short"),
    ("values", "np.argwhere(held > 1)", "np.argwhere(held > 2)", "a double goes unnoticed"),
    ("values", "if self.node[a] != self.node[b]:", "if False:", "nodes are as near as dies"),
    # metrics and traces
    ("metrics", "np.setdiff1d(b[b >= 0], a)", "np.setdiff1d(a[a >= 0], b[b >= 0][:-1])", "moves are counted wrongly"),
    ("metrics", "out / np.maximum(placement.counts(experts), 1)[:, None, :]", "out", "replicas do not share"),
    ("traces", "p = np.where(full, most, free * left / np.maximum(free.sum(-1, keepdims=True), 1e-300))",
     "p = np.where(full, most, free)", "capped probabilities are lost"),
    ("traces", "keep = np.exp(-1 / 1200)", "keep = np.exp(-1 / 120)", "a drift forgets ten times as fast"),
    # forecasts
    ("forecast", 'halves(x, "median") < halves(x, "mean")', 'halves(x, "median") > halves(x, "mean")',
     "the worse of mean and median"),
    ("forecast", "x[:cut], x[cut:], name", "x[cut:], x[:cut], name", "the past is foretold from the future"),
    ("forecast", "steady + drift * np.exp(-age / tau) * np.exp(-far / tau).mean()",
     "steady + drift * np.exp(-age / tau)", "nothing is forgotten ahead"),
    ("forecast", "            s = a[i, j]\n            for k in range(j):\n",
     "            s = a[i, j]\n            for k in range(j - 1):\n", "a wrong factor"),
    ("forecast", "slope = np.clip(slope, 0, spread)", "slope = np.clip(slope, 0, 0)", "no drift is ever seen"),
    ("forecast", "np.arange(len(x) - 1.0, -1.0, -1.0) / half_life", "np.arange(len(x)) / half_life",
     "old blocks weigh most"),
    ("forecast", "whole = whole[len(whole) % n:]", "whole = whole[:len(whole) - len(whole) % n]",
     "the latest blocks are left out"),
    # local search
    ("exchange", "joint[r, g] += part[f, g] - part[e, g]", "joint[r, g] += part[f, g]",
     "covariances are not taken back"),
    ("exchange", "v = var[r] + w + 2.0 * (joint[r, f] - joint[r, e])", "v = var[r] + w", "covariances are ignored"),
    ("exchange", "least or fixed[q, j] or held[r, f]:", "least or fixed[q, j]:", "doubles on a rank"),
    ("exchange", "least or fixed[q, j] or held[r, f]:", "least or held[r, f]:", "pinned slots are exchanged"),
    ("exchange", "refund = 2 * price * average", "refund = 0.0", "moves that are taken back earn nothing"),
    ("exchange", "unit[g], unit[e] = mean[g] / count[g], mean[e] / count[e]", "pass", "loads of replicas are stale"),
    ("exchange", "if x >= least or moves + new > budget:", "if x >= least:", "the budget is not kept"),
    ("exchange", "    slot[:], count[:] = best_slot, best_count\n", "", "the last moment is kept, not the best"),
    ("exchange", "if g < 0 or fixed[q, k] or count[g] < 2:", "if g < 0 or fixed[q, k] or count[g] < 1:",
     "the last replica goes"),
    ("exchange", "if e < 0 or fixed[r, k] or have[e] <= target[e]:", "if e < 0 or fixed[r, k] or have[e] < target[e]:",
     "experts fall below their number"),
    ("exchange", "if best < 0 or x < least:", "if best < 0 or x > least:", "the riskiest rank is filled"),
    ("exchange", "changed[r] = changed[q] = clock", "changed[r] = clock", "partners that changed are not tried again"),
    ("exchange", "y = 1.0 / (count[g] - 1) if held[h, g] else 0.0", "y = 0.0", "giving up a replica costs nothing"),
    ("loops", "if out[i, e] < most and", "if", "more replicas than ranks"),
    ("loops", "if free[r] > 0 and not held[r, e] and (best < 0 or load[r] < load[best]):",
     "if free[r] > 0 and (best < 0 or load[r] < load[best]):", "greedy puts two on a rank"),
    ("loops", "both += cov[e, f] / count[f]", "both += 0.0", "flash ignores covariances"),
    ("loops", "                        held[q, f] = False\n", "", "making room leaves a copy"),
    # policies
    ("problem", "stay = (row >= 0) & held[r, row]", "stay = (row >= 0) & held[r, row] & (row < 0)", "nobody stays"),
    ("problem", "match[size[:, None] != size[None, :]]", "match[size[:, None] < size[None, :] - 9]",
     "ranks of unequal size are renamed"),
    ("problem", "bad += now.check(load.experts)", "pass", "broken placements are taken"),
    ("policies/afl", "gain.mean() <= ERRORS * gain.std() / np.sqrt(max(len(gain) - 1, 1))", "gain.mean() <= -1e9",
     "no gate of standard errors"),
    ("policies/afl", "s.peak() < start.peak() - params.gate", "True", "no gate"),
    ("policies/afl", "fixed[place] = True", "pass", "pins are forgotten"),
    ("policies/afl", "left -= int((new != now).sum())", "pass", "each step has the whole budget"),
    ("policies/afl", "for _ in range(STEPS):", "for _ in range(1):", "planning stops early"),
    ("policies/afl", "    if not fixed.any():\n", "    if True:\n", "ranks with pinned slots are renamed"),
    ("policies/afl", "/ slowest / now.ranks", "/ slowest", "ranks receive one after the other"),
    ("policies/flash", "np.flatnonzero(load.total.any(1))", "range(load.layers)", "layers without load are planned"),
    ("policies/flash", "settle(relabel(found, out[layer]), out[layer])", "settle(found, out[layer])",
     "flash does not rename ranks"),
    ("policies/greedy", "unit = weight / count\n", "unit = weight / (count + 1)\n", "loads of replicas are wrong"),
    ("policies/swift", "if q == hot or sent[hot, q] or sent[q, hot]:", "if q == hot:", "two transfers per pair"),
]


def survives(part: str, old: str, new: str, folder: Path) -> bool:
    """Whether the tests of a part pass with a bug in it."""
    text = (ROOT / "afl/dist/eplb" / f"{part}.py").read_text()
    assert text.count(old) == 1, f"{part}.py has {text.count(old)} times {old!r}"
    shutil.copytree(ROOT / "afl", folder / "afl", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "afl/dist/eplb" / f"{part}.py").write_text(text.replace(old, new))
    tests = [str(ROOT / f"tests/eplb/test_{n}.py") for n in TESTS[part].split()]
    run = [sys.executable, "-m", "pytest", "-x", "-q", "--noconftest", "-p", "no:cacheprovider", "-k",
           "not ten_thousand and not ahead_of_flash and not second_plan", *tests]
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_DISABLE_JIT": "1"}
    try:
        done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return False
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


def main() -> None:
    wanted, caught = sys.argv[1:], 0
    chosen = [m for m in MUTANTS if not wanted or m[0] in wanted]
    for part, old, new, what in chosen:
        with tempfile.TemporaryDirectory() as folder:
            alive = survives(part, old, new, Path(folder))
        caught += not alive
        print(f"{'SURVIVES' if alive else 'caught  '} {part}: {what}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    raise SystemExit(caught < len(chosen))


if __name__ == "__main__":
    main()
