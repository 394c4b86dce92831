"""Where and when vendor operators are registered: on first use, once, over torch_npu's schemas or over our own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / ".venv-vendor" / "bin" / "python"
with_vendor = pytest.mark.skipif(not VENDOR.exists(), reason="`make vendor-check` makes the environment")

TOY = '''
import torch
from afl.errors import AflError, VendorRefusal
from afl.ops.emu.register import emulate, register, require
from afl.ops.emu.schemas import SCHEMAS

SCHEMAS["npu::toy"] = "npu::toy(Tensor x, float k=2., *, int[]? lens=None) -> Tensor"

@emulate("npu::toy")
def toy(x, k=2.0, *, lens=None):
    """x times k."""
    require(x.dtype == torch.float32, "x must be float32", x)
    require(lens is None or lens == sorted(lens), "lens must not decrease", lens)
    return x * k
'''

# a package that registers all operators itself, as torch_npu does
VENDOR_LIKE = '''
import torch
from afl.ops.emu.schemas import SCHEMAS
libraries = [torch.library.Library(space, "DEF") for space in ("npu", "atb")]
for name, schema in SCHEMAS.items():
    if name != "npu::toy":
        libraries[name.startswith("atb")].define(schema.partition("::")[2])
libraries[0].define("toy(Tensor x, float k=2., *, int[]? lens=None{more}) -> Tensor")
'''


def run(code: str, *path: Path, python: Path | str = sys.executable, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    command = [str(python), "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))} | env
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


def output(*args: object, **kwargs: object) -> str:
    done = run(*args, **kwargs)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    return done.stdout


def package(folder: Path, text: str) -> Path:
    """A folder that holds a package torch_npu of this text."""
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(text)
    return folder


def test_nothing_is_registered_or_imported_before_an_npu_chip_is_used(tmp_path: Path):
    folder = package(tmp_path, "print('vendor package imported')")
    code = "import sys, torch, afl; from afl import plugins; plugins.load_ops(); plugins.chip('cpu')\n"
    out = output(code + "print([s for s in torch._C._dispatch_get_all_op_names() if s.startswith(('npu::', 'atb::'))])",
                 folder)
    assert out == "[]\n"


def test_without_the_vendor_package_operators_run_on_cpu_tensors():
    out = output(TOY + '''
register(); register()
x = torch.ones(2)
print(torch.ops.npu.toy(x).tolist(), torch.ops.npu.toy(x, 3.0, lens=[1, 2]).tolist())
print(torch.ops.npu.toy.default._schema)
''')
    assert out == "[2.0, 2.0] [3.0, 3.0]\nnpu::toy(Tensor x, float k=2., *, int[]? lens=None) -> Tensor\n"


def test_a_refusal_names_operator_argument_and_what_it_got():
    out = output(TOY + '''
register()
for call in (lambda: torch.ops.npu.toy(torch.ones(2, 3).half()), lambda: toy(torch.ones(1), lens=[3, 1])):
    try:
        call()
    except VendorRefusal as e:
        print(e)
''')
    assert out.splitlines() == [
        "npu::toy: x must be float32; got x f16[2,3]", "npu::toy: lens must not decrease; got lens [3, 1]",
    ]


@pytest.mark.parametrize(("parameters", "word"), [
    ("x, k=1.0, *, lens=None", "'k'"), ("x, k=2.0, lens=None", "'lens'"), ("x, k=2.0", "2 parameters"),
    ("y, k=2.0, *, lens=None", "'y'"),
])
def test_an_implementation_must_have_the_parameters_of_the_schema(parameters: str, word: str):
    done = run(TOY.replace("def toy(x, k=2.0, *, lens=None)", f"def toy({parameters})") + "register()")
    assert done.returncode == 1 and "AflError: npu::toy: " in done.stderr and word in done.stderr


def test_an_operator_without_schema_is_refused_when_it_is_declared():
    done = run("from afl.ops.emu.register import emulate\nemulate('npu::npu_swiglue')(len)")
    assert "unknown vendor operator 'npu::npu_swiglue'; did you mean 'npu::npu_swiglu'?" in done.stderr


# ---- the vendor's package afterwards -------------------------------------------------------------------------------


def test_a_later_import_of_a_package_that_was_broken_is_refused_with_a_reason(tmp_path: Path):
    folder = package(tmp_path, "raise ImportError('libhccl.so: cannot open shared object file')")
    out = output(TOY + '''
register()
import importlib.util, sys
# now it would import, and define its operators a second time
open(r"%s", "w").write("raise SystemExit('torch would abort here')")
print(importlib.util.find_spec("torch_npu") is not None)
for how in ("import torch_npu", "import torch_npu.npu", "from torch_npu import npu"):
    try:
        exec(how)
    except ImportError as e:
        print(e.name, "|", e)
print(torch.ops.npu.toy(torch.ones(1)).item(), "torch_npu" in sys.modules)
''' % (folder / "torch_npu" / "__init__.py"), folder)
    first, *refusals, last = out.splitlines()
    assert first == "True" and last == "2.0 False"
    assert len(refusals) == 3
    for text in refusals:
        assert text.startswith("torch_npu | torch_npu cannot be imported now: ") and "emulates an NPU chip" in text


def test_an_import_of_a_package_that_is_not_there_fails_as_ever():
    done = run(TOY + "register()\nimport importlib.util as u\nprint(u.find_spec('torch_npu'))\nimport torch_npu")
    if "cannot be imported now" in done.stderr:
        pytest.skip("torch_npu is installed here")
    assert done.stdout == "None\n" and "ModuleNotFoundError: No module named 'torch_npu'" in done.stderr


def test_over_the_vendors_own_schemas_only_implementations_are_added(tmp_path: Path):
    folder = package(tmp_path, VENDOR_LIKE.format(more=""))
    out = output(TOY + '''
register()
import torch_npu
print(torch.ops.npu.toy(torch.ones(2)).tolist(), len(torch_npu.libraries))
''', folder)
    assert out == "[2.0, 2.0] 2\n"


def test_another_version_of_the_vendors_package_is_named(tmp_path: Path):
    folder = package(tmp_path, VENDOR_LIKE.format(more=", int n=0"))
    done = run(TOY + "register()", folder)
    assert done.returncode == 1
    assert "npu::toy: the installed torch_npu has another schema: npu::toy(Tensor x" in done.stderr


# ---- the real package ----------------------------------------------------------------------------------------------


@with_vendor
def test_the_real_package_is_used_where_its_libraries_are():
    out = output('''
import torch
from afl.ops.emu.register import register
register()
import torch_npu
x, g = torch.randn(3, 8), torch.rand(8)
y, r = torch_npu.npu_rms_norm(x, g, 1e-6)
print(torch.allclose(y, torch.nn.functional.rms_norm(x, (8,), g, 1e-6), atol=1e-5), tuple(r.shape))
''', python=VENDOR, LD_LIBRARY_PATH=str(VENDOR.parents[1] / "cann"))
    assert out.endswith("True (3, 1)\n")


@with_vendor
def test_the_real_package_without_its_libraries_is_refused_later():
    done = run('''
from afl.ops.emu.register import register
register()
import torch
print(torch.ops.npu.npu_rms_norm.default._schema.name, flush=True)
import torch_npu
''', python=VENDOR, LD_LIBRARY_PATH="")
    assert done.returncode == 1 and done.stdout == "npu::npu_rms_norm\n"
    assert "ImportError: torch_npu cannot be imported now" in done.stderr
