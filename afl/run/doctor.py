"""`afl doctor`: what the facts about a machine mean for afl, in plain words, and what to do about each.  No torch."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from afl.run.amounts import size
from afl.run.machine import NODES, Machine

OK, NOTE, WRONG = "ok", "note", "wrong"
EFFECTS = {     # what does not work without a package
    "torch": "no model can be loaded: run, check, inspect and eval do not work; chips, eplb and replay do",
    "numpy": "nothing but chips and doctor works",
    "numba": "the cpu chip has no compiled kernels, and planners are slow or refuse",
    "scipy": "the matching of experts in eplb and some kernels are missing",
    "safetensors": "Hugging Face folders cannot be read",
    "tokenizers": "text cannot be encoded; token ids can still be run",
    "jinja2": "chat templates cannot be applied",
    "gguf": ".gguf files cannot be read",
    "torch_npu": "vendor operators cannot be called; NPU chips are emulated",
}
LOST = {        # what does not work without a library of the vendor
    "libascendcl.so": "no device can be opened, and torch_npu does not import",
    "libhccl.so": "torch_npu does not import, and ranks could not talk to each other",
    "libge_runner.so": "torch_npu does not import",
    "libopapi.so": "none of the vendor's operators runs",
    "libatb.so": "operators of atb:: are missing (a package of its own, NNAL): all of chip 310p, some of a2 and a3",
}


@attrs.frozen
class Finding:
    """One thing that was looked at.  effect: what follows from it.  todo: what to do; both "" when all is well."""

    state: str
    what: str
    effect: str = ""
    todo: str = ""


@attrs.frozen
class Diagnosis:
    """All findings.  chips: name -> how `--chip NAME` runs here."""

    machine: Machine
    findings: tuple[Finding, ...]
    chips: Mapping[str, str]

    @property
    def healthy(self) -> bool:
        return all(f.state != WRONG for f in self.findings)

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {"healthy": self.healthy, "findings": [attrs.asdict(f) for f in self.findings],
                "chips": dict(self.chips), "machine": attrs.asdict(self.machine)}

    def __str__(self) -> str:
        m = self.machine
        rows = [f"afl {m.versions.get('afl', '(not installed, run from its folder)')}, Python {m.python}, {m.system}, "
                f"{m.cores} cores, {size(m.memory_bytes)} of memory available"]
        for f in self.findings:
            rows.append(f"{f.state:<6} {f.what}")
            rows += [f"       effect: {f.effect}"] * bool(f.effect) + [f"       do: {f.todo}"] * bool(f.todo)
        rows += [f"chip   {name}: {how}" for name, how in self.chips.items()]
        wrong = sum(f.state == WRONG for f in self.findings)
        rows.append("all is well" if not wrong else f"{wrong} thing{'s' * (wrong > 1)} to put right")
        return "\n".join(rows) + "\n"


def diagnose(m: Machine, socs: Mapping[str, str]) -> Diagnosis:
    """What the facts mean.  socs: name of a SoC -> chip of afl, for all chips; chips without one run anywhere."""
    found = (*_python(m), *_packages(m), *_pairs(m), *_vendor(m, socs), *_own(m))
    return Diagnosis(m, found, _chips(m, socs))


def _python(m: Machine) -> Iterator[Finding]:
    if _numbers(m.python) < (3, 11):
        yield Finding(WRONG, f"Python {m.python} is older than 3.11", "afl does not start",
                      "make an environment with Python 3.11 or newer")


def _packages(m: Machine) -> Iterator[Finding]:
    wanted = {re.split(r"[<>=!~ \[]", r, maxsplit=1)[0]: r for r in m.requires}
    good = []
    for name, said in m.imports.items():
        version, effect = m.versions.get(name, ""), EFFECTS.get(name, "")
        install = f"pip install '{wanted.get(name, name)}'"
        if said and not version:
            yield Finding(WRONG, f"{name} is not installed ({said})", effect, install)
        elif said and name != "torch_npu":
            yield Finding(WRONG, f"{name} {version} is installed but cannot be imported: {said}", effect,
                          install.replace("install", "install --force-reinstall --no-deps", 1))
        elif name in wanted and version and not holds(wanted[name], version):
            yield Finding(WRONG, f"{name} {version} is not what afl was made for: {wanted[name]}",
                          "results, and whether it runs at all, are untested", install)
        elif not said:
            good.append(f"{name} {version or '(of unknown version)'}")
    if good:
        yield Finding(OK, ", ".join(good))


def _pairs(m: Machine) -> Iterator[Finding]:
    torch, npu = m.versions.get("torch", ""), m.versions.get("torch_npu", "")
    if torch and npu and _numbers(torch) != _numbers(npu):
        base = ".".join(map(str, _numbers(torch)))
        yield Finding(WRONG, f"torch_npu {npu} and torch {torch} do not belong together",
                      "torch_npu is compiled against the torch of its own version: importing it fails or crashes",
                      f"pip install torch_npu=={base}, or the torch of version {'.'.join(map(str, _numbers(npu)))}")
    if "triton" in m.versions and "triton-ascend" in m.versions:
        yield Finding(WRONG, "triton and triton-ascend are both installed, and both provide the module triton",
                      "whichever was installed last has overwritten files of the other",
                      "pip uninstall triton triton-ascend, then install the one that is needed")


def _vendor(m: Machine, socs: Mapping[str, str]) -> Iterator[Finding]:
    """Devices, driver, toolkit, libraries and torch_npu: silent where nothing of them is there."""
    devices = [n for n in m.nodes if "davinci_manager" not in n and "davinci" in n]
    if not (devices or m.cards or m.home or "torch_npu" in m.versions):
        yield Finding(OK, "no NPU, no vendor libraries: running on the cpu and emulating a chip need neither")
        return
    yield from _devices(m, devices)
    if m.home:
        version = m.toolkit or "of unknown version"
        if m.sourced:
            yield Finding(OK, f"CANN toolkit {version} in {m.home}")
        else:
            yield Finding(WRONG, f"CANN toolkit {version} is in {m.home}, but its environment is not set",
                          "its libraries are not found", f"source {m.home}/set_env.sh before starting afl")
    elif devices:
        yield Finding(WRONG, "the CANN toolkit was not found", "no operator can run on the NPU",
                      "install the CANN toolkit and kernels for this chip, then source their set_env.sh")
    harm = WRONG if devices else NOTE           # without a device nothing is lost that could be used
    lost = {n: said for n, said in m.libraries.items() if said}
    for name, said in lost.items():
        todo = "install it, or add its folder to LD_LIBRARY_PATH (set_env.sh does)"
        yield Finding(harm, f"{name} cannot be loaded: {said}", LOST[name], "" if m.home and not m.sourced else todo)
    if "torch_npu" in m.versions and m.imports.get("torch_npu"):
        cause = "the libraries above are missing" if lost else "see the message"
        yield Finding(harm, f"torch_npu {m.versions['torch_npu']} cannot be imported: {m.imports['torch_npu']}",
                      f"{EFFECTS['torch_npu']}; {cause}", "put right what is named above, or pip uninstall torch_npu")
    elif "torch_npu" not in m.versions and devices:
        yield Finding(WRONG, "torch_npu is not installed", EFFECTS["torch_npu"], "pip install 'afl[npu]'")
    for soc in dict.fromkeys(m.socs):
        if soc in socs:
            yield Finding(OK, f"{m.socs.count(soc)} device(s) {soc}: chip {socs[soc]}")
        else:
            yield Finding(WRONG, f"device {soc} is no chip that afl knows", "none of its kernels can be chosen",
                          "add its name to `soc` of a chip in afl/ops/chips, or write a new one there")


def _devices(m: Machine, devices: list[str]) -> Iterator[Finding]:
    driver = m.driver or "of unknown version"
    if devices:
        yield Finding(OK, f"{len(devices)} NPU device file(s), driver {driver}")
        lacking = [n for n in NODES if not any(p.endswith("/" + n) for p in m.nodes)]
        if lacking:
            yield Finding(WRONG, f"device files are missing: {', '.join(lacking)}", "the NPU cannot be opened",
                          "in a container, pass them on: " + " ".join(f"--device /dev/{n}" for n in lacking))
        closed = [p for p, may in m.nodes.items() if not may]
        if closed:
            yield Finding(WRONG, f"this user may not open {', '.join(closed)}", "the NPU cannot be opened",
                          "add the user to the group that owns the files (ls -l), and log in again")
    elif m.cards:
        yield Finding(WRONG, f"{m.cards} NPU card(s) on the bus, but no /dev/davinci files", "the NPU cannot be opened",
                      "install the driver and firmware; in a container, pass the device files on")
    elif not m.socs:
        yield Finding(NOTE, "vendor software is installed, but there is no NPU", "NPU chips are emulated")


def _own(m: Machine) -> Iterator[Finding]:
    for row in m.variables:
        yield Finding(WRONG, row, "it is ignored", "correct or unset it")
    if m.plugins:
        yield Finding(OK, f"plugins: {', '.join(m.plugins)}")


def _chips(m: Machine, socs: Mapping[str, str]) -> dict[str, str]:
    here = {socs[s] for s in m.socs if s in socs}
    able = not (m.imports.get("torch", "") or m.imports.get("numpy", ""))
    found = {"cpu": "runs on this host" if able else "cannot run, see above"}
    for name in dict.fromkeys(socs.values()):
        why = "its device is here, but afl does not place tensors on it yet" if name in here else "no such device here"
        found[name] = f"emulated on this host ({why})" if able else "cannot run, see above"
    return found


def holds(requirement: str, version: str) -> bool:
    """Whether a version meets "name==1.2" or "name>=1.2"; other comparisons are left to the installer.

    >>> holds("torch==2.13.0", "2.13.0+cpu"), holds("attrs>=24", "23.2"), holds("x>=2", "2.0.1"), holds("x==2", "2.0.1")
    (True, False, True, False)
    """
    found = re.fullmatch(r"[\w.-]+\s*(==|>=)\s*([\d.]+)", requirement.strip())
    if not found:
        return True
    have, want = _numbers(version), _numbers(found[2])
    return have == want if found[1] == "==" else have >= want


def _numbers(version: str) -> tuple[int, int, int]:
    """Major, minor and patch number; what follows them (rc1, .post2, +cpu) is left out."""
    found = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-zA-Z]", version, maxsplit=1)[0])[:3]]
    major, minor, patch = (*found, 0, 0, 0)[:3]
    return major, minor, patch
