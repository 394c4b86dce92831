"""The same bits in every process: with and without compilation, on one thread and on several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def planned(**env: str) -> str:
    """What a fresh process plans under an environment."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | env
    return subprocess.run([sys.executable, "-c", CODE], env=env, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def here() -> str:
    out = planned()
    assert len(out.split()) == 10 and len(set(out.split()[1::2])) == 5
    return out


@pytest.mark.parametrize("env", [
    {"NUMBA_DISABLE_JIT": "1"},
    {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3", "PYTHONHASHSEED": "7"},
], ids=["interpreted", "one thread", "three threads"])
def test_every_policy_plans_the_same(here, env):
    assert planned(**env) == here
