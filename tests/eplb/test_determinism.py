"""The same bits in every process: with and without compilation, on one thread and on several."""

import os
import subprocess
import sys
from pathlib import Path

import afl

CODE = """
import hashlib
import numpy as np
from afl.dist.eplb import policies, traces
from afl.dist.eplb.values import LoadWindow, Params, Placement, Topology
now, topology = Placement.initial(2, 14, 20, 4), Topology.regular(4, ranks_per_node=2)
for policy in policies.names():
    out = hashlib.sha256()
    for seed, trace in enumerate(traces.names()):
        w = LoadWindow.of(traces.trace(trace, steps=20, layers=2, experts=14, tokens=99, topk=2, seed=seed))
        new = policies.load(policy)(w, now, topology, Params(max_move_frac=1.0, tol=0, gate=0))
        out.update(new.phys_to_log.tobytes())
    print(policy, out.hexdigest())
"""


ENVIRONMENTS = [
    {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3", "PYTHONHASHSEED": "7"},
    {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
    {"NUMBA_DISABLE_JIT": "1"},
]


def test_every_policy_plans_the_same_in_every_process():
    base = os.environ | {"PYTHONPATH": str(Path(afl.__file__).parents[1])}
    runs = [subprocess.Popen([sys.executable, "-c", CODE], env=base | env, stdout=subprocess.PIPE, text=True)
            for env in ENVIRONMENTS]
    threads, one, interpreted = (r.communicate(timeout=300)[0].splitlines() for r in runs)
    assert len(threads) == 5 and len({line.split()[1] for line in threads}) == 5
    assert threads == one == interpreted
