"""`afl doctor`: what the facts about a machine mean, and that finding them out survives whatever is broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from afl.run.doctor import EFFECTS, LOST, OK, WRONG, diagnose
from afl.run.machine import LIBRARIES, MODULES, NODES, Machine, look, probe

SOCS = {"Ascend910_9391": "a3", "Ascend910B3": "a2"}
WELL = Machine(
    "3.12.1", versions={n: "9.9.9" for n in MODULES} | {"torch": "2.13.0+cpu", "afl": "0.1.0"},
    requires=("torch==2.13.0", "numpy>=2", "attrs>=24"), imports=dict.fromkeys(MODULES, ""),
)
NPU = attrs.evolve(
    WELL, versions={**WELL.versions, "torch_npu": "2.13.0.post1"}, imports={**WELL.imports, "torch_npu": ""},
    nodes=dict.fromkeys(("/dev/davinci0", "/dev/davinci1", *(f"/dev/{n}" for n in NODES)), True), cards=2,
    driver="25.1", home="/usr/local/Ascend/cann", toolkit="8.5.0", sourced=True, libraries=dict.fromkeys(LIBRARIES, ""),
    socs=("Ascend910_9391", "Ascend910_9391"),
)


def test_what_is_in_order_is_called_well():
    for m in (WELL, NPU):
        d = diagnose(m, SOCS)
        assert d.healthy and {f.state for f in d.findings} == {OK} and str(d).endswith("all is well\n")
    assert "2 device(s) Ascend910_9391: chip a3" in str(diagnose(NPU, SOCS))
    assert "emulated" in diagnose(WELL, SOCS).chips["a3"] and set(diagnose(WELL, SOCS).chips) == {"cpu", "a2", "a3"}


CASES = {
    "Python 3.10.4 is older": attrs.evolve(WELL, python="3.10.4"),
    "torch 2.13.0+cpu is installed but cannot be imported: boom": attrs.evolve(
        WELL, imports={**WELL.imports, "torch": "boom"}),
    "numba is not installed": attrs.evolve(
        WELL, imports={**WELL.imports, "numba": "no"}, versions={n: "9.9" for n in MODULES if n != "numba"} | {
            "torch": "2.13.0"}),
    "torch 2.11.0 is not what afl was made for: torch==2.13.0": attrs.evolve(
        WELL, versions={**WELL.versions, "torch": "2.11.0"}),
    "numpy 1.26.4 is not what afl was made for: numpy>=2": attrs.evolve(
        WELL, versions={**WELL.versions, "numpy": "1.26.4"}),
    "torch_npu 2.12.0rc1 and torch 2.13.0+cpu do not belong together": attrs.evolve(
        NPU, versions={**NPU.versions, "torch_npu": "2.12.0rc1"}),
    "triton and triton-ascend are both installed": attrs.evolve(
        WELL, versions={**WELL.versions, "triton": "3.9", "triton-ascend": "3.2"}),
    "torch_npu is not installed": attrs.evolve(NPU, versions=WELL.versions, imports=WELL.imports, socs=()),
    "torch_npu 2.13.0.post1 cannot be imported: libhccl.so": attrs.evolve(
        NPU, imports={**NPU.imports, "torch_npu": "libhccl.so"}),
    "libatb.so cannot be loaded: gone": attrs.evolve(NPU, libraries={**NPU.libraries, "libatb.so": "gone"}),
    "the CANN toolkit was not found": attrs.evolve(NPU, home="", toolkit="", sourced=False),
    "its environment is not set": attrs.evolve(NPU, sourced=False),
    "device files are missing: hisi_hdc": attrs.evolve(
        NPU, nodes={n: True for n in NPU.nodes if "hisi" not in n}),
    "may not open /dev/davinci1": attrs.evolve(NPU, nodes={**NPU.nodes, "/dev/davinci1": False}),
    "2 NPU card(s) on the bus, but no /dev/davinci files": attrs.evolve(NPU, nodes={}),
    "device Ascend999 is no chip": attrs.evolve(NPU, socs=("Ascend999",)),
    "AFL_X is not known": attrs.evolve(WELL, variables=("AFL_X is not known",)),
}


@pytest.mark.parametrize("words", CASES)
def test_each_thing_that_is_wrong_is_said_alone_with_its_effect_and_what_to_do(words):
    d = diagnose(CASES[words], SOCS)
    (f,) = [f for f in d.findings if f.state == WRONG]
    assert words in f.what and f.effect and f.todo and not d.healthy and "1 thing to put right" in str(d)
    json.dumps(d.record())


def test_every_package_and_library_has_an_effect():
    assert set(EFFECTS) == {*MODULES, "torch_npu"} and set(LOST) == set(LIBRARIES)


def test_software_of_the_vendor_without_a_device_is_no_harm_and_missing_libraries_are_named():
    m = attrs.evolve(WELL, versions=NPU.versions, imports=NPU.imports | {"torch_npu": "libhccl.so: cannot open"},
                     libraries=dict.fromkeys(LIBRARIES, "cannot open"))
    d = diagnose(m, SOCS)
    assert d.healthy and "there is no NPU" in str(d) and "the libraries above are missing" in str(d)
    assert all(f"{n} cannot be loaded: cannot open" in str(d) for n in LIBRARIES)
    with_device = diagnose(attrs.evolve(m, nodes=NPU.nodes), SOCS)
    assert sum(f.state == WRONG for f in with_device.findings) == len(LIBRARIES) + 2, "and torch_npu, and no toolkit"


def test_devices_cards_and_toolkits_are_found_in_the_files(tmp_path: Path):
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "davinci7", "davinci_manager", "hisi_hdc"):
        (tmp_path / "dev" / name).write_text("")
    for place, vendor, kind in (("a", "0x19e5", "0x120000"), ("b", "0x19e5", "0x020000"), ("c", "0x10de", "0x120000")):
        folder = tmp_path / "sys/bus/pci/devices" / place
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n"), (folder / "class").write_text(kind + "\n")
    ascend = tmp_path / "usr/local/Ascend"
    (ascend / "driver").mkdir(parents=True), (ascend / "cann/compiler").mkdir(parents=True)
    (ascend / "driver/version.info").write_text("Version=25.2.0\nascendhal_version=7\n")
    (ascend / "cann/compiler/version.info").write_text("Version=8.5.0.1\n")
    m = look(tmp_path, {**os.environ, "AFL_PLUGNS": "off"})
    assert [Path(p).name for p in m.nodes] == ["davinci0", "davinci7", "davinci_manager", "hisi_hdc"]
    assert (m.cards, m.driver, m.toolkit, m.sourced) == (1, "25.2.0", "8.5.0.1", False)
    assert m.imports["torch"] == "" and m.versions["torch"].startswith("2.") and "AFL_PLUGINS" in m.variables[0]
    assert all("cannot open" in said for said in m.libraries.values())
    text = str(diagnose(m, SOCS))
    assert "device files are missing: devmm_svm" in text and "set_env.sh" in text


@pytest.mark.parametrize(("code", "words"), [
    ("raise ValueError('first\\nlast')", "last"), ("import os; os.abort()", "crashed with signal 6"),
    ("import sys; sys.exit(3)", "ended with status 3"), ("import time; time.sleep(99)", "did not end within 1 s"),
    ("import sys; sys.stdout.write('x' * (1 << 20)); sys.exit('much')", "much"), ("print('fine')", ""),
])
def test_a_probe_reports_whatever_becomes_of_its_program(code, words):
    (said, bad), = probe({("k", "n"): (code, "n")}, os.environ, 1.0 if "sleep" in code else 20.0).values()
    assert bad == words and (bad or said == "fine")


@pytest.mark.parametrize("body", ["raise RuntimeError('undefined symbol: _ZN3c10')", "import os; os.abort()"])
def test_the_command_works_though_torch_cannot_be_imported(tmp_path: Path, body):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(body + "\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = [sys.executable, "-m", "afl_cli", "doctor"]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    said = "undefined symbol: _ZN3c10" if "raise" in body else "crashed with signal 6"
    assert "cannot be imported" in done.stdout and said in done.stdout
    assert "no model can be loaded" in done.stdout and "cpu: cannot run" in done.stdout
    assert "numpy" in next(row for row in done.stdout.splitlines() if row.startswith("ok"))


def test_a_command_line_that_cannot_start_says_so_without_a_traceback(tmp_path: Path):
    (tmp_path / "typer.py").write_text("raise ImportError('no typer today')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = [sys.executable, "-m", "afl_cli", "doctor"]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=60)
    assert done.returncode == 1 and "no typer today" in done.stderr and "Traceback" not in done.stderr
