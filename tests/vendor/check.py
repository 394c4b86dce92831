"""Holds afl's NPU kernels and their emulation against the real torch_npu.  `make vendor-check` runs it.

(a) every schema of the table equals the one that torch_npu registers;
(b) every vendor call written in afl names an operator of torch_npu, with arguments that one of its schemas takes;
(c) every kernel of every NPU chip runs its conformance cases on fake tensors, with torch_npu's shape functions, and on
    the stub device, with its host code, eagerly and in a graph (fake_chip.py, a process per chip);
(d) the decode programs of every chip that captures are captured and replayed by torch_npu's own graphs (graphs.py, a
    process per chip); a chip that does not says why;
(e) what that cannot prove is listed: operators without shape function, and those of atb::, which have neither.

Exit status 1 if anything differs.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from afl import chip as chips
from afl import device, plugins
from afl.ops.emu import register
from afl.ops.emu.schemas import SCHEMAS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPACES = ("npu", "atb")


@attrs.frozen
class Call:
    """A vendor call in the text: operator with overload if one is named, positional count (None: unknown), keywords."""

    where: str
    name: str
    positional: int | None
    keywords: tuple[str | None, ...]


def real_schemas() -> dict[str, Any]:
    """Name with overload -> schema, of all that torch_npu has registered."""
    found = [s for s in torch._C._jit_get_all_schemas() if s.name.split("::")[0] in SPACES]
    return {s.name + (f".{s.overload_name}" if s.overload_name else ""): s for s in found}


def differing_schemas(real: dict[str, Any]) -> Iterator[str]:
    """Rows of the table that torch_npu does not have, or has otherwise."""
    for name, text in SCHEMAS.items():
        if name not in real:
            yield f"{name}: torch_npu has no such operator"
        elif real[name] != torch._C.parse_schema(text):
            yield f"{name}: torch_npu declares\n      {real[name]}\n    the table has\n      {text}"


def vendor_calls(root: Path) -> Iterator[Call]:
    """Every call `npu.NAME(...)`, `npu.NAME.OVERLOAD(...)`, `torch.ops.npu...`, and of atb, below a folder."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := vendor_name(node.func)):
                star = any(isinstance(a, ast.Starred) for a in node.args)
                words = tuple(k.arg for k in node.keywords)
                where = f"{path.relative_to(root.parent)}:{node.lineno}"
                yield Call(where, name, None if star else len(node.args), words)


def vendor_name(f: ast.expr) -> str | None:
    """"npu::name" or "npu::name.overload" of a called expression, None for anything else."""
    words: list[str] = []
    while isinstance(f, ast.Attribute):
        words.insert(0, f.attr)
        f = f.value
    words.insert(0, f.id if isinstance(f, ast.Name) else "")
    words = words[2:] if words[:2] == ["torch", "ops"] else words
    if len(words) not in (2, 3) or words[0] not in SPACES:
        return None
    overload = "" if words[2:] in ([], ["default"]) else f".{words[2]}"
    return f"{words[0]}::{words[1]}{overload}"


def refused(c: Call, real: dict[str, Any]) -> str | None:
    """Why torch_npu does not take a call, or None."""
    named = {n: s for n, s in real.items() if n == c.name or n.partition(".")[0] == c.name}
    if not named:
        return f"{c.where}: torch_npu has no {c.name}"
    why = [f"{n}: {text}" for n, s in named.items() if (text := misfit(c, s))]
    return f"{c.where}: " + "; ".join(why) if len(why) == len(named) else None


def misfit(c: Call, schema: Any) -> str | None:
    """How the arguments of a call do not fit one schema, or None."""
    words = [w for w in c.keywords if w is not None]
    names = [a.name for a in schema.arguments]
    unknown = sorted(set(words) - set(names))
    if unknown:
        return f"no argument {', '.join(unknown)}"
    if c.positional is None or None in c.keywords:        # *args, **kwargs: their number is not in the text
        return None
    free = [a.name for a in schema.arguments if not a.kwarg_only]
    if c.positional > len(free):
        return f"{c.positional} positional arguments, it takes {len(free)}"
    twice = sorted(set(words) & set(free[: c.positional]))
    if twice:
        return f"{', '.join(twice)} given twice"
    lacking = [a.name for a in schema.arguments if not a.has_default_value()
               and a.name not in words and a.name not in free[: c.positional]]
    return f"lacks {', '.join(lacking)}" if lacking else None


def unknown_soc_names(chip: chips.Chip) -> list[str]:
    """Names of the chip that do not occur in the vendor's library."""
    package = device.vendor_package()
    assert package is not None and package.__file__
    text = (Path(package.__file__).parent / "lib" / "libtorch_npu.so").read_bytes()
    return [s for s in chip.soc if s.encode() + b"\0" not in text]


def on_chip(chip: chips.Chip, script: str = "fake_chip.py") -> dict[str, Any] | str:
    """The report of a script with the stub's chip set to this one, or the text of its failure."""
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "ops"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"CANN_STUB_SOC": chip.soc[0], "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", str(HERE / script), chip.name]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1800)
    if done.returncode:
        return "\n".join(done.stderr.strip().splitlines()[-12:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(r: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Lines about one chip, and its mismatches."""
    calling = {n: k for n, k in r["kernels"].items() if k["calls"]}
    wrong = {n: [p for p in k["problems"] if ": known: " not in p] for n, k in r["kernels"].items()}
    good = [n for n in calling if not wrong[n]]
    whole = [n for n in good if not any(c.startswith("atb::") for c in calling[n]["calls"])]
    cases = sum(k["cases"] for k in calling.values())
    lines = [f"{r['chip']} ({r['soc']}, vendor id {r['soc_id']}): {len(good)} of {len(calling)} vendor-calling kernels "
             f"agree in {cases} cases, {len(whole)} of them in every call, the others apart from operators of atb::"]
    plain = sorted(n for n, k in r["kernels"].items() if not k["calls"])
    lines += [f"    without vendor call: {', '.join(plain)}"] if plain else []
    lines += [f"    {n} {p}" for n, k in calling.items() for p in k["problems"] if ": known: " in p]
    lines.append(f"    storage formats compared: {', '.join(r['formats']) or 'none'}")
    idle = [] if calling else [f"{r['chip']} has no kernel that calls a vendor operator"]
    return lines, [f"{r['chip']} {n} {p}" for n, found in wrong.items() for p in found] + r["storage"] + idle


def graph_report(r: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Lines about the captured programs of one chip, and its mismatches."""
    wrong = [f"{r['chip']} graphs: {p}" for p in [*r["tables"], *r.get("problems", ())]]
    if r["captures"]:
        counts = ", ".join(f"{name} {len(found)}" for name, found in r["launches"].items())
        lines = [f"    graphs of torch_npu: decode captured and replayed; launches as of the program: {counts}"]
        return lines, wrong + ([] if all(r["launches"].values()) else [f"{r['chip']} graphs: nothing was launched"])
    kernels = sorted({row.partition(" is not capturable")[0] for row in r["problems_of_the_plan"]})
    lines = [f"    graphs: decode is not captured, because of {', '.join(kernels)}",
             f"    torch_npu itself says of a product: {' '.join(r['torch_npu'].split())}"]
    named = "equation 0 of program 'product'" in r["torch_npu"]
    return lines, wrong + ([] if named and kernels else [f"{r['chip']} graphs: {r['torch_npu']}"])


def main() -> int:
    """Print the report; the number of mismatches decides the exit status."""
    package = device.vendor_package()
    if package is None:
        print("torch_npu cannot be imported: run `make vendor-check`, which builds its environment")
        return 2
    plugins.load_ops()
    register.load()
    real = real_schemas()
    calls = list(vendor_calls(ROOT / "afl"))
    called = {c.name for c in calls}
    problems = list(differing_schemas(real))
    problems += [text for c in calls if (text := refused(c, real))]
    absent = sorted(n for n in called if not any(n in (s, s.partition(".")[0]) for s in SCHEMAS))
    problems += [f"{n} is called and has no row in afl/ops/emu/schemas.py" for n in absent]
    print(f"torch_npu {package.__version__}: {len(SCHEMAS)} schemas of the table compared, of which "
          f"{len(register.IMPLEMENTATIONS)} are emulated; {len(calls)} calls of {len(called)} operators in the text")
    unproven: set[str] = set()
    npus = [c for c in chips.registered().values() if c.soc]
    for chip in npus:
        problems += [f"{chip.name}: torch_npu does not know {s!r}" for s in unknown_soc_names(chip)]
        found = on_chip(chip)
        if isinstance(found, str):
            problems.append(f"{chip.name}: the check did not run\n{found}")
            continue
        lines, wrong = report(found)
        print("\n".join(lines))
        problems += wrong
        graphs = on_chip(chip, "graphs.py")
        if isinstance(graphs, str):
            problems.append(f"{chip.name}: graphs were not checked\n{graphs}")
        else:
            lines, wrong = graph_report(graphs)
            print("\n".join(lines))
            problems += wrong
        unproven |= {n for k in found["kernels"].values() for n in k["calls"]} - set(found["with_shapes"])
    host = sorted(n for n in unproven if n.startswith("npu::"))
    print(f"called, without shape function, compared with host code only: {', '.join(host) or 'none'}")
    print(f"called, and unproven beyond the schema: {', '.join(sorted(unproven - set(host))) or 'none'}")
    for text in problems:
        print(f"MISMATCH  {text}")
    print(f"vendor-check: {len(npus)} chips, {len(problems)} mismatches")
    return 1 if problems or not npus else 0


if __name__ == "__main__":
    sys.exit(main())
