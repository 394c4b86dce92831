"""An op, a chip, a model and a policy are one new file each: dropped into a copy of the tree, or into a plugin."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tree_imports import ROOT

OP = '''
"""An invented op."""

from typing import Any

from torch import Tensor

from afl.ir.op import FLOAT, T, op


@op
def {name}(x: T[Tensor, "*b d", FLOAT], *, by: float) -> T[Tensor, "*b d", "x"]:
    """x with its channels in reverse order, times a number."""
    return x.flip(-1) * by


@{name}.cases
def _(rng: Any) -> Any:
    yield rng.normal(3, 5), {{"by": 2.0}}
'''

CHIP = '''
"""An invented chip with a kernel that only it has."""

import torch
from torch import Tensor

from afl.chip import Chip, F, Limits, register
from afl.ir.kernel import kernel
from afl.ops.act import swiglu

CHIP = register(Chip(
    name="{name}", features=frozenset({{F.TORCH_CPU, "{name}_gate"}}), dtypes=("float32",),
    limits=Limits(block_tokens=(128, (128,))), allows_reference=True,
))


@kernel(swiglu, needs={{"{name}_gate"}}, name="{name}_gate", priority=5)
def _gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
'''

NPU_CHIP = '''
"""An invented NPU: it lacks the vendor's cache write, and stores weights by columns."""

import math

import torch
from torch import Tensor

from afl.chip import Chip, F, Limits, register
from afl.ir.kernel import kernel
from afl.ir.op import HALF
from afl.layout import Layout, register as register_layout
from afl.ops.attention import write_kv
from afl.ops.linear import linear, logits
from afl.ops.vendor import npu


def transposed(stored: Tensor) -> Tensor:
    """The memory [i, o] of a weight [o, i]."""
    o, i = stored.shape
    return stored.as_strided((i, o), (o, 1))


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    made.afl_fmt = "columns"
    return made


def put(stored: Tensor, rows: Tensor, at: int) -> None:
    transposed(stored)[:, at : at + len(rows)] = rows.T


register_layout(Layout("columns", "columns", empty, put, lambda x: transposed(x).T.contiguous(),
                       lambda shape, dtype: math.prod(shape) * dtype.itemsize))
register(Chip(
    name="{name}", features=frozenset({{F.NPU, F.FIA, "{name}_own"}}), dtypes=("float16", "bfloat16"),
    limits=Limits(block_tokens=(128, (128,)), graph_streams=64),
    layouts={{"linear.weight": "columns", "head.weight": "columns", "kv.paged": "bsnd"}},
))


@kernel(linear, needs={{"{name}_own"}}, dtypes=HALF, fmt={{"w": "columns"}}, name="by_columns")
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return npu.npu_linear(x, transposed(w).T.contiguous(), bias)


@kernel(logits, needs={{"{name}_own"}}, dtypes=HALF, fmt={{"w": "columns"}}, name="by_columns")
def _logits(x: Tensor, w: Tensor) -> Tensor:
    return npu.npu_linear(x, transposed(w).T.contiguous()).float()


@kernel(write_kv, needs={{"{name}_own"}}, inplace={{0: "k_cache", 1: "v_cache"}}, name="by_index")
def _write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    at = slot.clamp(min=0).long()
    for cache, new in ((k_cache, k), (v_cache, v)):
        rows = cache.view(-1, *cache.shape[2:])
        real = (slot >= 0)[:, None, None]
        last = torch.where(real, new, rows[at])
        for j in range(len(at)):              # one behind the other: padding may repeat slot 0
            rows[at[j]] = torch.where(real[j], last[j], rows[at[j]])
    return k_cache, v_cache
'''

USE_NPU_CHIP = '''
import torch
from conformance import all_chips, all_ops, ambiguous, combinations, conforms
from afl import plugins
from afl.chip import F, get
from afl.run.load import random_model
torch.set_num_threads(1)
rows = [it for it in combinations() if it.chip.name == "{name}"]
for it in rows:
    conforms(it)
for op in all_ops():
    ambiguous(op, get("{name}"))
names = sorted({{(it.op.name, it.kernel.name) for it in rows}})
print(len(names), [k for _, k in names if k.startswith("by_")], any(k == "npu_scatter_pa" for _, k in names))
sizes = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             head_dim=16, vocab_size=61, max_position_embeddings=256, tie_word_embeddings=False)
told = []
for chip in ("{name}", "a2"):
    m = random_model("LlamaForCausalLM", sizes, seed=3, chip=chip, dtype="float16", max_model_len=128, max_seqs=3)
    told.append([x.token_ids for x in m.generate([[5], [7, 3, 9, 11, 2], list(range(40))], max_tokens=9)])
    print(type(m.params.layers[0].down.w).__name__, getattr(m.params.layers[0].down.w, "afl_fmt", "nd"))
print(told[0] == told[1])
'''

MODEL = '''
"""An invented model: Llama's block under another name."""

from afl.models import llama
from afl.models.spec import ModelDef, register


def config(j):
    return llama.read_config(j, "{name}", eps=1e-6, max_len=64, theta=10000.0)


register(ModelDef("{name}", config, llama.params, llama.caches, llama.step))
'''

POLICY = '''
"""Longest prompt first."""

from afl.sched.policies.registry import register


def order(s, ticket, params):
    """Prompt length, longest first."""
    return (-len(ticket.tokens), ticket.number)


register("longest", order=order)
'''

USE_OP = '''
import torch
from afl import plugins
from afl.ir import op, trace
plugins.load_ops()
flip = op.registered()["{name}"]
print(flip(torch.tensor([[1.0, 2.0]]), by=2.0).tolist())
print(trace.trace(lambda x: flip(x, by=2.0), torch.ones(3, 4)).graph)
'''

USE_CHIP = '''
import torch
from afl import chip, plugins
from afl.ir.kernel import explain
from afl.ir.trace import Eager, using
from afl.ops.act import swiglu
from afl.types import type_of
c = plugins.chip("{name}")
x = torch.ones(2, 6)
print(explain(swiglu, (type_of(x),), (), c))
with using(Eager(c)):
    print(swiglu(x).shape)
print("{name}" in chip.registered(), "{name}" in chip.names())
print(explain(swiglu, (type_of(x),), (), plugins.chip("cpu")))
'''

USE_MODEL = '''
from afl import plugins
from afl.errors import ConfigError
print(plugins.model("{name}").name)
try:
    plugins.model("{name}x")
except ConfigError as e:
    print(e)
'''


def run(code: str, *path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with `path` in front of everything else."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | env
    python = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(python, capture_output=True, text=True, env=environment, cwd=path[0], timeout=300)


def output(code: str, *path: Path, **env: str) -> str:
    done = run(code, *path, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project that is imported instead of it."""
    root = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "afl", root / "afl")
    shutil.copytree(ROOT / "cli", root / "afl_cli")
    assert output("import afl; print(afl.__file__)", root).startswith(str(root))
    return root


@pytest.fixture
def drop(copy: Path):
    """Write one file into the copy; it is gone after the test, so each file is alone."""
    made: list[Path] = []

    def write(place: str, text: str) -> Path:
        path = copy / place
        assert not path.exists()
        path.write_text(text.lstrip())
        made.append(path)
        return copy

    yield write
    for path in made:
        path.unlink()


def test_an_op_is_one_file(drop):
    root = drop("afl/ops/flip_scaled.py", OP.format(name="flip_scaled"))
    out = output(USE_OP.format(name="flip_scaled"), root)
    assert "[[4.0, 2.0]]" in out and "%1:f32[3,4] = flip_scaled %0 {by=2.0}" in out


def test_a_chip_is_one_file(drop):
    root = drop("afl/ops/chips/a7.py", CHIP.format(name="a7"))
    out = output(USE_CHIP.format(name="a7"), root)
    assert "swiglu on a7: chosen a7_gate" in out
    assert "needs numba" in out, "a kernel whose feature the chip lacks is rejected by name"
    assert "torch.Size([2, 3])" in out and "True True\n" in out
    assert "a7_gate" in out.split("swiglu on cpu")[1], "other chips show the kernel as rejected"


def test_an_npu_chip_with_a_layout_of_its_own_is_one_file_and_passes_the_whole_conformance_suite(drop):
    root = drop("afl/ops/chips/a9.py", NPU_CHIP.format(name="a9"))
    out = output(USE_NPU_CHIP.format(name="a9"), root, ROOT / "tests", ROOT / "tests" / "ops").splitlines()
    assert out[0].endswith("['by_columns', 'by_columns', 'by_index'] False") and int(out[0].split()[0]) > 25
    assert out[1:] == ["Tensor columns", "Tensor nd", "True"]


def test_a_model_is_one_file(drop):
    root = drop("afl/models/flamingo.py", MODEL.format(name="FlamingoForCausalLM"))
    out = output(USE_MODEL.format(name="FlamingoForCausalLM"), root)
    assert out.startswith("FlamingoForCausalLM\n") and "did you mean 'FlamingoForCausalLM'?" in out
    assert "LlamaForCausalLM" in out


def test_a_scheduler_policy_is_one_file(drop):
    root = drop("afl/sched/policies/longest.py", POLICY)
    out = output(textwrap.dedent('''
        import sys
        from afl.sched import Arrived, Policy, Request, SchedConfig, init, policies, step
        print(policies.names(), policies.get("longest").order)
        s = init(SchedConfig(4, 8, 32, 8, 4))
        new = [Arrived(Request("short", [1, 2], 2)), Arrived(Request("long", [1, 2, 3, 4, 5], 2))]
        _, plan, _ = step(s, new, policies.get("longest"))
        print(plan, "torch" in sys.modules)
    '''), root)
    assert "'longest'" in out and "] longest" in out
    assert out.index("long:5") < out.index("short:2") and out.endswith("False\n")


# ---- plugins -------------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, files: dict[str, str], entry: str) -> Path:
    """Build and return a wheel that declares `entry` in the group of plugins."""
    source = folder / name
    (source / name).mkdir(parents=True)
    for file, text in files.items():
        (source / name / file).write_text(text.lstrip())
    (source / "pyproject.toml").write_text(textwrap.dedent(f'''
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"
        [project]
        name = "{name}"
        version = "1"
        [project.entry-points."afl.plugins"]
        {name} = "{entry}"
        [tool.setuptools]
        packages = ["{name}"]
    '''))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*pip, "--no-index", "--wheel-dir", str(folder), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob(f"{name}-*.whl"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two installed plugins: one that works, one that raises when it is imported."""
    folder = tmp_path_factory.mktemp("plugins")
    works = {
        "__init__.py": "from afl_flamingo import chip, model, op\n",
        "op.py": OP.format(name="flip_scaled"), "chip.py": CHIP.format(name="a7"),
        "model.py": MODEL.format(name="FlamingoForCausalLM"),
    }
    wheels = [
        wheel(folder, "afl_flamingo", works, "afl_flamingo"),
        wheel(folder, "afl_broken", {"__init__.py": 'raise RuntimeError("built for another version")\n'}, "afl_broken"),
    ]
    target = folder / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index", "--target"]
    done = subprocess.run([*pip, str(target), *map(str, wheels)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_an_installed_plugin_adds_an_op_a_chip_and_a_model(site: Path):
    uses = USE_OP.format(name="flip_scaled"), USE_CHIP.format(name="a7"), USE_MODEL.format(name="FlamingoForCausalLM")
    out = output("".join(uses), site)
    assert "[[4.0, 2.0]]" in out and "swiglu on a7: chosen a7_gate" in out and "\nFlamingoForCausalLM\n" in out


def test_a_plugin_that_fails_to_import_is_named_and_skipped(site: Path):
    done = run("from afl import plugins; print(plugins.load_plugins())", site)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "afl_broken" in done.stdout
    assert done.stderr.count("afl_broken") == 1 and "built for another version" in done.stderr


def test_plugins_can_be_switched_off(site: Path):
    code = "import sys; from afl import plugins; plugins.load_ops(); print('afl_flamingo' in sys.modules)"
    done = run(code, site, AFL_PLUGINS="off")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_no_plugin_is_imported_before_somebody_asks(site: Path):
    done = run("import afl, afl.sched, afl.plugins, sys; print('afl_flamingo' in sys.modules)", site)
    assert (done.stdout, done.stderr) == ("False\n", "")
