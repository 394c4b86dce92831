"""Seeded bugs in transfers, rounds, routing, machine and planner process: each must make the tests of its part fail.

A bug is a replacement of text in one file of a copy of the package.  `python tests/eplb/mutants_machine.py` prints the
score; `test_mutants_machine.py` runs it, too.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = {
    "diff": "rounds", "rounds": "rounds", "machine": "machine", "routing": "routing", "plan": "worker plan",
    "worker": "worker", "wire": "worker",
}
MUTANTS = [
    # transfers
    ("diff", "vacated = np.flatnonzero((before >= 0) & ~np.isin(before, after))",
     "vacated = np.flatnonzero(before >= 0)[:(~np.isin(real, before)).sum()]", "stayers lose their slots"),
    ("diff", "        row[[path[i], s]] = row[[s, path[i]]]\n", "", "rings are not cut"),
    ("diff", "        path[i:] = [s]\n", "        path[i:] = []\n        del where[s // size]\n",
     "the rest of a cut ring is forgotten"),
    ("diff", "if e not in kept and e in comes}", "if e in kept and e in comes}", "the last copy goes first"),
    ("diff", "        add(ring, -1)\n", "        for s in ring:\n            add([s], -1)\n", "a ring is taken apart"),
    ("diff", "sorted(writes, key=lambda w: (len(holders[w.layer, w.expert]), w))", "writes",
     "experts with many holders choose first"),
    ("diff", "best = np.lexsort((ranks, sent[ranks], sends[ranks], near[ranks, dst]))[0]",
     "best = np.lexsort((ranks, near[ranks, dst]))[0]", "all copies leave one holder"),
    ("diff", "best = np.lexsort((ranks, sent[ranks], sends[ranks], near[ranks, dst]))[0]",
     "best = np.lexsort((ranks, sent[ranks], sends[ranks]))[0]", "distance does not matter"),
    ("diff", "            add([c], place[wait[c]])\n", "            add([c], -1)\n", "a chain does not wait"),
    ("diff", "Transfer(w.layer, w.expert, int(ranks[best]), int(at[best] % size), dst, w.slot % size)",
     "Transfer(w.layer, w.expert, int(ranks[best]), int(at[best] // size), dst, w.slot % size)",
     "wrong source slot"),
    # rounds
    ("rounds", "        if into[dst[i]][a] != -1:\n            _flip(dst[i], a, b, src, dst, out, into)\n", "",
     "no path is flipped"),
    ("rounds", "c = b if c == a else a\n    for i, c in path:", "c = a\n    for i, c in path:",
     "paths do not alternate"),
    ("rounds", "        now = apply(now, moves)\n", "", "sources of a later wave are those of the first"),
    ("rounds", "                room[i][r] -= n\n", "", "waves take more than the staging slots hold"),
    ("rounds", "max([at[behind] if behind >= 0 else 0, *", "max([0, *", "no write waits"),
    ("rounds", "if max(need.values()) > staging:", "if False:", "a ring that does not fit is looked for for ever"),
    ("rounds", "commits += [()] * (len(made) - 1) + [tuple(dict.fromkeys(w.layer for w in wave))]",
     "commits += [tuple(dict.fromkeys(w.layer for w in wave))] + [()] * (len(made) - 1)",
     "a wave commits with its first round"),
    ("rounds", "if starts and (i in ends or used + s > window or window <= 0):",
     "if starts and (used + s > window or window <= 0):", "waves overlap in a step"),
    ("rounds", "math.ceil(used / window - 1e-9)", "1", "long rounds are given one step"),
    ("rounds", "window = params.step_seconds * params.link_share", "window = params.step_seconds",
     "transfers take all of the links"),
    ("rounds", "staging = params.staging or int(moved.max(initial=0))", "staging = params.staging or 1 << 30",
     "everything is one wave without a limit"),
    # routing
    ("routing", "at = (turn + source + chosen) % r.count[layer, chosen]",
     "at = (source + chosen) % r.count[layer, chosen]", "a rank always takes the same replica"),
    ("routing", "at = (turn + source + chosen) % r.count[layer, chosen]", "at = turn % r.count[layer, chosen]",
     "every rank starts at the first replica"),
    ("routing", "counted = np.ones(len(flat), bool) if live is None else np.repeat(live, chosen.shape[1])",
     "counted = np.ones(len(flat), bool)", "padding takes turns, too"),
    ("routing", "at = (np.arange(rows)[:, None] + experts) % r.count[layer]", "at = (np.arange(rows)[:, None] // 2) % "
     "r.count[layer]", "replicas twice in a row"),
    # machine
    ("machine", "if event.ticket != s.ticket:", "if event.ticket > s.ticket:", "late plans count"),
    ("machine", "isinstance(s.phase, Moving | Draining) and event.index < s.phase.started",
     "isinstance(s.phase, Moving) and event.index < s.phase.started", "copies that end late are not counted"),
    ("machine", "done = min(r.done for r in b.reports)", "done = max(r.done for r in b.reports)",
     "the fastest rank decides"),
    ("machine", "done = min(r.done for r in b.reports)", "done = report(s).done", "every rank decides for itself"),
    ("machine", "elif 0 not in plans and len(plans) > 1:", "elif False:", "different plans are taken"),
    ("machine", "    if 0 in plans:\n        return s, ()\n    plan = s.local.plan\n",
     "    plan = s.local.plan\n    if plan is None:\n        return s, ()\n",
     "a rank begins before the others have the plan"),
    ("machine", "if any(r.failed for r in reports):", "if s.local.failed:", "one rank alone gives up planning"),
    ("machine", "if any(r.abort for r in b.reports)", "if False", "one rank alone gives up moving"),
    ("machine", "elif 0 in plans and s.step - s.phase.asked >= s.cadence.plan_steps:", "elif False:",
     "a planner that hangs is waited for"),
    ("machine", "Draining(phase.started)) if phase.started > done else _cool(s)",
     "Draining(phase.started)) if False else _cool(s)", "copies still run when the next plan is made"),
    ("machine", "return (_cool(s) if done >= s.phase.started else s), ()", "return s, ()", "draining never ends"),
    ("machine", "return (_cool(s) if done >= s.phase.started else s), ()", "return _cool(s), ()",
     "draining ends at once"),
    ("machine", "group in phase.ready[phase.done:done]", "group in phase.ready[:done]",
     "a wave commits again and again"),
    ("machine", "group in phase.ready[phase.done:done]", "group in phase.ready[phase.done:phase.started]",
     "what was started commits before it arrived"),
    ("machine", "    if done == phase.started:\n        s, begin = _start(s)\n        return s, (*effects, *begin)\n",
     "    if done <= phase.started < len(phase.plan.rounds):\n        s, begin = _start(s)\n        return s, "
     "(*effects, *begin)\n", "the next wave starts before this one has committed"),
    ("machine", "elif not abort and s.step - phase.moved >= s.cadence.stall_steps:", "elif False:",
     "a move that stalls is never given up"),
    ("machine", "s = evolve(s, placement=apply(s.placement, ready), epoch=s.epoch + 1)",
     "s = evolve(s, placement=phase.plan.placement, epoch=s.epoch + 1)", "the first wave commits the whole plan"),
    ("machine", "epoch=s.epoch + 1)", "epoch=s.epoch)", "commits do not count"),
    ("machine", "return evolve(s, phase=Heat(s.step), local=Local())", "return evolve(s, phase=Heat(s.step))",
     "a plan of the time before is still there"),
    ("machine", "    while done in s.local.finished:\n        done += 1\n", "    done = len(s.local.finished)\n",
     "rounds that end out of order count as the first ones"),
    ("machine", "ticket = s.ticket + 1", "ticket = s.ticket or 1", "all plans have the same ticket"),
    ("machine", "ticket=ticket, window=fresh)", "ticket=ticket)", "a window never ends"),
    # plans and the planner process
    ("plan", "urgent = np.argsort(-(before - after) * load.sum(1), kind=\"stable\")",
     "urgent = np.argsort((before - after) * load.sum(1), kind=\"stable\")", "the least useful layer first"),
    ("plan", "    bad = new.check(window.experts)\n    if bad:", "    bad = []\n    if bad:",
     "a policy's mistakes get through"),
    ("plan", "if now.by_rank[t.layer, t.src_rank, t.src_slot] != t.expert]", "if False]",
     "wrong sources get through"),
    ("plan", "    if now != plan.placement:\n", "    if False:\n", "rounds that lead elsewhere get through"),
    ("worker", "late = threading.Timer(self.seconds, job.end)", "late = threading.Timer(1e6, job.end)",
     "a planner that hangs is not ended"),
    ("worker", "        bad = faults(made, start.placement, start.window.experts)\n", "        bad = []\n",
     "plans are not checked"),
    ("worker", "        if process.returncode:\n", "        if False:\n", "what a dead planner said is read"),
    ("wire", "if at + size > len(data):", "if False:", "arrays may end after the message"),
    ("wire", "for i, layer in a[\"commits\"].tolist():", "for i, layer in a[\"commits\"].tolist()[1:]:",
     "a commit is lost"),
]


def survives(part: str, old: str, new: str, folder: Path) -> bool:
    """Whether the tests of a part pass with a bug in it."""
    text = (ROOT / "afl/dist/eplb" / f"{part}.py").read_text()
    assert text.count(old) == 1, f"{part}.py has {text.count(old)} times {old!r}"
    shutil.copytree(ROOT / "afl", folder / "afl", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "afl/dist/eplb" / f"{part}.py").write_text(text.replace(old, new))
    tests = [str(ROOT / f"tests/eplb/test_{n}.py") for n in TESTS[part].split()]
    run = [sys.executable, "-m", "pytest", "-x", "-q", "--noconftest", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
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
        print(f"{'SURVIVES' if alive else 'caught  '}  {part}: {what}", flush=True)
    print(f"{caught} of {len(chosen)} caught")


if __name__ == "__main__":
    main()
