"""What this machine has, found out without importing anything that could fail: packages, vendor libraries, devices.

Whatever may raise, crash or hang (importing torch, loading a library) happens in a process of its own with a time
limit; what it said is a fact like any other.  `afl/run/doctor.py` judges the facts.
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import attrs

from afl import config as configs

MODULES = ("torch", "numpy", "numba", "scipy", "safetensors", "tokenizers", "jinja2", "gguf")    # imported by afl
OPTIONAL = ("torch_npu", "triton", "triton-ascend", "transformers")         # distributions that matter if present
LIBRARIES = ("libascendcl.so", "libhccl.so", "libge_runner.so", "libopapi.so", "libatb.so")
NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")        # device files that every process needs beside its davinciN
HOMES = ("ascend-toolkit/latest", "cann", "nnae/latest")    # below /usr/local/Ascend
SECONDS = 60.0

_IMPORT = "import importlib, sys; importlib.import_module(sys.argv[1])"
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_SOCS = ("import json, sys, torch, torch_npu; n = torch.npu.device_count()\n"
         "print('\\n' + json.dumps([torch.npu.get_device_name(i) for i in range(n)]))")


@attrs.frozen
class Machine:
    """Facts.  A text "" in `imports` and `libraries` means that it went well, else it is what was said.

    versions: distribution -> version, of those that are installed.  requires: what afl asks of them.
    nodes: device file -> whether this user may open it.  cards: accelerators of the vendor on the PCI bus.
    home: folder of the vendor's toolkit.  sourced: whether its environment is set.  socs: names, by torch_npu.
    """

    python: str = "3.11.0"
    system: str = ""
    cores: int = 1
    memory_bytes: int = 0
    versions: Mapping[str, str] = attrs.field(factory=dict)
    requires: tuple[str, ...] = ()
    imports: Mapping[str, str] = attrs.field(factory=dict)
    nodes: Mapping[str, bool] = attrs.field(factory=dict)
    cards: int = 0
    driver: str = ""
    home: str = ""
    toolkit: str = ""
    sourced: bool = False
    libraries: Mapping[str, str] = attrs.field(factory=dict)
    socs: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()     # complaints about AFL_ variables


def look(root: Path = Path("/"), environ: Mapping[str, str] | None = None, seconds: float = SECONDS) -> Machine:
    """The facts about this machine; raises nothing.  root: where its files are.  seconds: limit of what may hang."""
    environ = dict(configs.environment() if environ is None else environ)
    versions = {n: v for n in ("afl", *MODULES, *OPTIONAL) if (v := _version(n))}
    home = _home(root, environ)
    commands = {("import", n): (_IMPORT, n) for n in (*MODULES, *(("torch_npu",) if "torch_npu" in versions else ()))}
    commands |= {("load", n): (_LOAD, n) for n in LIBRARIES}
    if "torch_npu" in versions:
        commands["socs", ""] = (_SOCS, "")
    said = probe(commands, environ, seconds)
    names, bad = said.pop(("socs", ""), ("", "-"))
    devices = sorted((root / "dev").glob("davinci[0-9]*"))
    return Machine(
        platform.python_version(), f"{platform.system()} {platform.machine()}", configs.usable_cores(),
        configs.available_memory(), versions, _requires(), {n: e for (k, n), (_, e) in said.items() if k == "import"},
        {str(p): _opens(p) for p in (*devices, *(root / "dev" / n for n in NODES)) if p.exists()},
        _cards(root), _field(root / "usr/local/Ascend/driver/version.info"), str(home or ""), _toolkit(home),
        "ASCEND_HOME_PATH" in environ, {n: e for (k, n), (_, e) in said.items() if k == "load"},
        tuple(_names(names)) if not bad else (),
        tuple(e.name for e in metadata.entry_points(group="afl.plugins")), tuple(configs.unknown_variables(environ)),
    )


def probe(
    commands: Mapping[tuple[str, str], tuple[str, str]], environ: Mapping[str, str], seconds: float
) -> dict[tuple[str, str], tuple[str, str]]:
    """(last line of the output, "" or what went wrong) of programs that run side by side, by key.

    commands: key -> (python text, its argument).  Output goes to files: a pipe that nobody empties stops a program.
    """
    env = {**environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONWARNINGS": "ignore"}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for i, (key, (code, argument)) in enumerate(commands.items()):
            out, err = Path(folder) / f"{i}.out", Path(folder) / f"{i}.err"
            with out.open("wb") as o, err.open("wb") as e:
                run = [sys.executable, "-c", code, argument]
                running[key] = subprocess.Popen(run, stdin=subprocess.DEVNULL, stdout=o, stderr=e, env=env), out, err
        end = time.monotonic() + seconds
        for key, (process, out, err) in running.items():
            try:
                status = process.wait(max(0.0, end - time.monotonic()))
                wrong = "" if status == 0 else _last(err) or f"ended with status {status}"
                wrong = f"crashed with signal {-status}" if status < 0 else wrong
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                wrong = f"did not end within {seconds:.0f} s"
            found[key] = _last(out), wrong
    return found


def _last(path: Path) -> str:
    lines = [r.strip() for r in path.read_text("utf-8", "replace").splitlines() if r.strip()]
    return lines[-1][:400] if lines else ""


def _version(name: str) -> str:
    """The installed version, or "" if there is none or its record is damaged."""
    try:
        return str(metadata.version(name) or "")
    except Exception:       # a damaged record raises whatever its reader stumbles over
        return ""


def _requires() -> tuple[str, ...]:
    """What the installed afl requires, as "name" and comparison; extras left out."""
    try:
        rows = metadata.requires("afl") or []
    except metadata.PackageNotFoundError:
        return ()
    return tuple(r for r in rows if ";" not in r)


def _names(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return [str(n) for n in found] if isinstance(found, list) else []


def _opens(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except PermissionError:
        return False
    except OSError:         # in use, or no such device behind it: the file itself may be opened
        return True


def _cards(root: Path) -> int:
    """Processing accelerators (PCI class 12) of vendor 19e5."""
    count = 0
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        kind = vendor.parent / "class"
        count += _text(vendor).strip() == "0x19e5" and _text(kind).startswith("0x12")
    return count


def _home(root: Path, environ: Mapping[str, str]) -> Path | None:
    places = [Path(environ["ASCEND_HOME_PATH"])] if environ.get("ASCEND_HOME_PATH") else []
    places += [root / "usr/local/Ascend" / n for n in HOMES]
    return next((p for p in places if p.is_dir()), None)


def _toolkit(home: Path | None) -> str:
    files = [] if home is None else [*home.glob("*/ascend_toolkit_install.info"), *home.glob("*/version.info")]
    return next((v for f in files if (v := _field(f))), "")


def _field(path: Path) -> str:
    """The value of `version=` in a file of such rows."""
    found = re.search(r"^\s*version\s*=\s*\[?([\w.+-]+)", _text(path), re.I | re.M)
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
