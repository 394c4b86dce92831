"""Nine of ten mutants of the NPU kernels are caught by the tests of this folder; the others have a reason each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import conformance
import pytest
from mutants_kernels import FILES, Swapped, conforming, mutants, table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAME = "the same result: "
AXIS = SAME + "axis 1 of a matrix is the last one"
HOST = "a host has one device; `make vendor-check` sees it"
UNUSED = SAME + "a greedy row does not use it"
NEVER = "the two sides are equal in no row whose numbers are rounded: the border has a slack"
# function: change, part of the line, and why no test of values can tell
SURVIVORS = [
    ("npu_norm._add_rms_norm: operands x and residual exchanged", "", SAME + "a sum of two"),
    ("npu_act._swiglu: -1: operator turned", "return", AXIS),
    ("npu_rope._few: -1: operator turned", "APPLIED[-1]", SAME + "there are two widths, the last one is number 1"),
    ("npu_rope._wide: -1: operator turned", "torch.cat", AXIS),
    ("npu_rope._rope_in_place: 1 to 2", "zeros_like", SAME + "heads of zeros, whose result is thrown away"),
    ("npu_rope._rope_in_place: 1 to 2", "repeat(1, 2)", SAME + "the angles of each token once more"),
    ("fia.fits: k * e <= MOST_PAGE: comparison 0 turned", "", SAME + "e is a multiple of 16, the limit is odd"),
    ("fia.fits: 512 to 513", "", SAME + "a block is a multiple of 128"),
    ("fia.attend: without device=", "", HOST),
    ("atb_nz.attend: without device=", "", HOST),
    ("atb_nz.causal_mask: 10000.0 to 10001.0", "", SAME + "float16 rounds it to 10000"),
    ("atb_paged._attend: 1 to 2", "clamp(min=1)", SAME + "a padding row is zeroed whatever it reads"),
    ("npu_torch._greedy: -1: operator turned", "argmax(-1)", AXIS),
    ("npu_torch._put_tokens: 1 to 2", "(0, 1)", SAME + "the place for what goes nowhere is cut off"),
    ("npu_torch._edit_logits: 1 to 2", "(0, 0, 0, 1)", SAME + "the row for what edits nothing is cut off"),
    ("npu_torch._edit_logits: y > 0: comparison 0 turned", "", SAME + "0 times and 0 divided"),
    ("npu_torch._sample: without dim=", "sort", SAME + "the last dimension is what sort takes by itself"),
    *(("npu_torch._sample: -1: operator turned", line, AXIS)
      for line in ("best =", "sort(dim=-1", "rising =", "mass =", "total =", "at =", "last =")),
    ("npu_torch._sample: 0.0 to 1.0", "plain[:, None], 0.0", UNUSED),
    ("npu_torch._sample: 1.0 to 2.0", "plain, 1.0", UNUSED),
    ("npu_torch._sample: mass <= (1 - top_p", "", NEVER),
    ("npu_torch._sample: p < min_p", "", NEVER),
    ("npu_torch._sample: total.gather(1, at[:, None])[:, 0] > goal: comparison 0 turned", "",
     SAME + "unless u is 1, which it never is"),
    ("npu_torch._sample: top_p < 1: comparison 0 turned", "", SAME + "a top_p of 1 drops what has no mass"),
    ("npu_torch._sample: 1 to 2", "top_p < 1", SAME + "a top_p of 1 drops what has no mass"),
    ("npu_torch._sample: top_k >= v: comparison 0 turned", "", SAME + "all reach the v-th largest"),
    ("npu_torch._sample: without device=", "", HOST),
]


def known(what: str) -> bool:
    """Whether a survivor stands in the list."""
    return any(what.startswith(start) and part in what.partition(" | ")[2] for start, part, _ in SURVIVORS)


def test_every_file_of_npu_kernels_is_listed():
    from afl.chip import registered

    npu = set().union(*(c.features for c in registered().values() if c.soc))
    found = {k.fn.__module__.rpartition(".")[2] for op in conformance.all_ops() for k in op.kernels if k.needs & npu}
    # an op's own body may serve as kernel: its meaning is no kernel's
    assert not [name for name in found - set(FILES) if not any((ROOT / "afl").rglob(f"ops/{name}.py"))
                and name != "collectives"]
    assert set(FILES) <= found


@pytest.mark.parametrize("name", FILES)
def test_the_first_mutant_of_a_file_is_caught_and_leaves_nothing_behind(name: str):
    caught = []
    for m in mutants(name)[:8]:
        with Swapped(m):
            caught.append(not conforming(name))
    assert any(caught), "the mutants do not reach the kernels"
    assert conforming(name) and table(name)


@pytest.mark.soak
def test_nine_of_ten_mutants_are_caught_and_the_others_are_known():
    found: dict[str, int] = {}
    alive: dict[str, list[str]] = {}
    for name in FILES:
        code = ("import json, sys, torch; torch.set_num_threads(1); import mutants_kernels as m; "
                "made = m.mutants(sys.argv[1]); alive = [x.what for x in made if m.survives(x)]; "
                "print(json.dumps([len(made), alive]))")
        path = os.pathsep.join([str(HERE.parent), str(HERE)])
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": path}, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        found[name], alive[name] = json.loads(done.stdout.splitlines()[-1])
    total, left = sum(found.values()), sum(map(len, alive.values()))
    print(f"{total} mutants, {total - left} caught, {(total - left) / total:.1%}", *sum(alive.values(), []), sep="\n  ")
    assert total >= 350 and left <= total / 10
    assert not [w for ways in alive.values() for w in ways if not known(w)]
