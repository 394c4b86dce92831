"""Builds libraries in place of CANN's, so that torch_npu imports and runs its host code on a machine without an NPU.

    .venv-vendor/bin/python tests/vendor/stub.py FOLDER          (needs gcc and binutils; 7 s)

What the installed wheel wants is read from its own files: libraries that it links to and that are missing, symbols
that nobody provides, and names in its text that it looks up at run time.  cann.c and opapi.c hold the functions that
must do something; each other one returns 0.  One library has all symbols and all state, the missing ones are empty and
linked to it:

    FOLDER/libcannstub.so   FOLDER/<each missing library>   FOLDER/libopapi.so (the operators)

Put FOLDER on LD_LIBRARY_PATH before the process starts.  No operator computes anything.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import attrs

HERE = Path(__file__).parent
CC = ("gcc", "-O1", "-fPIC", "-shared", "-w")
# functions that are looked up by name at run time
BY_NAME = re.compile(rb"(?<![A-Za-z0-9_])(?:acl(?:rt|prof|op|mdl|dump|tdt|sys)?|Hccl|Msprof|hal|drv|dcmi|rt)"
                     rb"[A-Z][A-Za-z0-9_]{3,60}(?=\0)")
OPERATOR = re.compile(rb"aclnn[A-Z][A-Za-z0-9_]{2,80}")
SYSTEM = re.compile(r"libpython|ld-linux|linux-vdso")
RUNTIME_VERSION = re.compile(r"GLIBC|CXXABI|GCC")
OPENED_LATER = ("libnnopbase.so",)                     # fused attention opens it by name


@attrs.frozen
class Library:
    """What one shared library wants and gives."""

    path: Path
    needs: frozenset[str]
    undefined: frozenset[str]
    defined: frozenset[str]


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read(path: Path) -> Library:
    """The dynamic section and the dynamic symbols of a library."""
    needs = re.findall(r"\(NEEDED\).*\[(.*?)\]", output("readelf", "-d", str(path)))
    undefined, defined = set(), set()
    for line in output("nm", "-D", "--with-symbol-versions", str(path)).splitlines():
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        if kind == "U" and not RUNTIME_VERSION.match(version.lstrip("@")):
            undefined.add(name)
        elif kind not in "Uwv":
            defined.add(name)
    return Library(path, frozenset(needs), frozenset(undefined), frozenset(defined))


def libraries(folder: Path) -> list[Library]:
    """Every shared library below a folder."""
    found = [p for p in sorted(folder.rglob("*.so*")) if p.is_file() and not p.is_symlink()]
    return [read(p) for p in found if p.open("rb").read(4) == b"\x7fELF"]


def wanted(wheel: list[Library], torch: list[Library]) -> tuple[list[str], set[str], set[str]]:
    """Missing libraries, runtime symbols, and operators that the wheel asks for."""
    system = dict(re.findall(r"^\s*(\S+) .*=> (\S+)$", output("/sbin/ldconfig", "-p"), re.M))
    present = {x.path.name for x in [*wheel, *torch]}
    needs = {n for x in wheel for n in x.needs} - present
    missing = sorted(n for n in needs if n not in system and not SYSTEM.match(n))
    provided = {s for x in [*wheel, *torch] for s in x.defined}
    provided |= {s for n in needs & set(system) for s in read(Path(system[n])).defined}
    symbols = {s for x in wheel for s in x.undefined if not s.startswith(("Py", "_Py"))} - provided
    operators: set[str] = set()
    for x in wheel:
        text = x.path.read_bytes()
        symbols |= {m.decode() for m in BY_NAME.findall(text)} - provided
        operators |= {m.decode().removesuffix("GetWorkspaceSize") for m in OPERATOR.findall(text)}
    symbols = {s for s in symbols if not s.startswith("aclnn")} | {"aclDestroyAclOpExecutor"}
    return missing, symbols, operators


def compiled(source: Path, folder: Path) -> tuple[Path, set[str]]:
    """The object file of a C file, and the names that it defines."""
    target = folder / f"{source.stem}.o"
    subprocess.run(["gcc", "-O1", "-fPIC", "-w", "-c", str(source), "-o", str(target)], check=True)
    return target, {line.split()[-1] for line in output("nm", "--defined-only", str(target)).splitlines()}


def link(target: Path, *inputs: str) -> None:
    """A shared library called like its file."""
    subprocess.run([*CC, *inputs, f"-Wl,-soname,{target.name}", "-o", str(target)], check=True)


def nothing(symbol: str) -> str:
    """C text of a symbol that does nothing: a function, or a table of a C++ class."""
    return f"char {symbol}[4096];" if symbol.startswith("_ZT") else f"long {symbol}(void) {{ return 0; }}"


def main(folder: Path, site: Path) -> None:
    """Write all libraries into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    missing, symbols, operators = wanted(libraries(site / "torch_npu"), libraries(site / "torch" / "lib"))
    runtime, own = compiled(HERE / "cann.c", folder)
    rest = folder / "rest.c"
    rest.write_text("\n".join(nothing(s) for s in sorted(symbols - own)))
    link(folder / "libcannstub.so", str(runtime), str(rest))
    empty = folder / "empty.c"
    empty.write_text("")
    for name in (*missing, *OPENED_LATER):
        link(folder / name, str(empty), f"-L{folder}", "-Wl,--no-as-needed", "-lcannstub", "-Wl,-rpath,$ORIGIN")
    api, own = compiled(HERE / "opapi.c", folder)
    names = {n for o in operators for n in (o, f"{o}GetWorkspaceSize")} - own
    rest.write_text("long launch(const char *);\n" + "\n".join(
        f'long {s}(void) {{ return launch("{s}"); }}' if s in operators and not s.endswith("WorkspaceSize")
        else nothing(s) for s in sorted(names)))
    link(folder / "libopapi.so", str(api), str(rest))
    print(f"{len(missing)} missing libraries, {len(symbols)} runtime symbols, {len(operators)} operators")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sysconfig.get_path("platlib")))
