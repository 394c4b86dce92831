"""Importing afl on a machine where torch's backend autoload would raise (torch_npu without its vendor libraries)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def broken_backend(tmp_path: Path) -> Path:
    """An installed distribution whose entry point in the group of torch backends raises."""
    info = tmp_path / "vendor_backend-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nvendor = vendor_backend:autoload\n")
    (tmp_path / "vendor_backend.py").write_text("def autoload():\n    raise ImportError('libvendor.so: cannot open')\n")
    return tmp_path


def run(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment["PYTHONPATH"] = str(site)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)


def test_the_fake_does_break_plain_torch(broken_backend: Path):
    done = run("import torch", broken_backend)
    assert done.returncode != 0 and "libvendor.so" in done.stderr


@pytest.mark.parametrize("code", [
    "import afl, torch; print(torch.ones(2).sum())",
    "from afl.models import llama; print('tensor(2.)')",
    "import afl_cli, torch; print(torch.ones(2).sum())",
])
def test_afl_then_torch_works(code: str, broken_backend: Path):
    done = run(code, broken_backend)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor(2.)\n", "")


def test_the_command_line_starts(broken_backend: Path):
    done = run("import sys; sys.argv = ['afl', '--help']; from afl_cli.main import main; main()", broken_backend)
    assert done.returncode == 0 and "run" in done.stdout and not done.stderr


def test_torch_that_is_already_imported_is_left_alone(tmp_path: Path):
    code = "import torch, os, afl; print('TORCH_DEVICE_BACKEND_AUTOLOAD' in os.environ)"
    assert run(code, tmp_path).stdout == "False\n"


def test_the_users_own_setting_wins(tmp_path: Path):
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    code = f"import os; os.environ[{name!r}] = '1'; import afl; print(os.environ[{name!r}])"
    assert run(code, tmp_path).stdout == "1\n"
