"""Who may import whom, as data, and a reader of imports.  A package that is missing here fails the test."""

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]

BASE = {"errors", "machine_code", "tree", "versioned", "chip", "config", "types", "layout", "plugins"}
# the part of BASE that leaves torch alone
PLAIN = {"errors", "machine_code", "tree", "versioned", "chip", "config"}
LIBRARY = {"ir", "dist", "dist.eplb", "dist.eplb.policies", "ops", "ops.caches", "ops.quant", "models", "sched",
           "sched.policies", "device"}

# package or module (without the leading "afl.") -> what it may import besides itself
ALLOWED: dict[str, set[str]] = {
    "": BASE | LIBRARY | {"run"},                # the lazy public surface
    "errors": set(),
    "versioned": {"machine_code"},
    "machine_code": set(),                       # numba, handed in by the caller
    "types": {"errors"},
    "layout": {"errors", "types"},
    "tree": {"errors"},
    "chip": {"errors"},
    "config": {"errors"},
    "plugins": {"chip", "config", "errors", "models"},          # asks the registry of models, lazily
    "device": BASE | {"device_npu", "device_fake"},             # imports the vendor package; opens a driver
    "device_npu": BASE | {"device"},
    "device_fake": BASE | {"device"},
    "ir": BASE,
    "dist": BASE | {"ir"},
    "dist.eplb": PLAIN | {"dist", "dist.eplb.policies"},
    "dist.eplb.policies": PLAIN | {"dist.eplb"},
    "ops": BASE | {"ir", "dist", "ops.emu"},     # vendor.py registers the emulation on first use
    "ops.caches": BASE | {"ir", "ops"},
    "ops.emu": BASE | {"ops", "ops.kernels", "device"},         # vendor operators on CPU
    "ops.quant": BASE | {"ir", "ops"},
    "ops.kernels": BASE | {"ir", "dist", "ops", "ops.caches", "ops.quant", "device"},
    "ops.chips": BASE | {"ir", "ops", "ops.caches", "ops.kernels"},
    "models": BASE | {"ops", "ops.caches", "ops.quant", "dist"},
    "sched": PLAIN | {"sched.policies"},
    "sched.policies": PLAIN | {"sched"},
    "run": BASE | LIBRARY,
    "cli": BASE | LIBRARY | {"run"},
}

PLANNERS = ("sched", "sched.policies", "dist.eplb", "dist.eplb.policies")
TORCH_FREE = (*PLANNERS, "errors", "machine_code", "versioned", "tree", "chip", "config", "plugins")


@attrs.frozen
class Module:
    """One source file: dotted name ("ops.rope"; "cli.main" for afl_cli.main), and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The row of the table that this module belongs to."""
        return row_of(self.name)

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))


def row_of(name: str) -> str:
    """The longest row of the table that `name` lies in; its first word if there is none."""
    parts = name.split(".") if name else []
    for n in range(len(parts), 0, -1):
        if ".".join(parts[:n]) in ALLOWED:
            return ".".join(parts[:n])
    return parts[0] if parts else ""


def modules(root: Path = ROOT) -> list[Module]:
    """Every module of afl and of the command line."""
    out = []
    for top, prefix in (("afl", ""), ("cli", "cli")):
        for path in sorted((root / top).rglob("*.py")):
            parts = [p for p in path.relative_to(root / top).with_suffix("").parts if p != "__init__"]
            name = ".".join([prefix, *parts] if prefix else parts)
            out.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return out


def imports(m: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also those inside functions; relative ones made absolute."""
    full = "afl_" + m.name if m.name.split(".")[0] == "cli" else f"afl.{m.name}".rstrip(".")
    package = full if m.path.name == "__init__.py" else full.rpartition(".")[0]
    for node in ast.walk(m.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from ((node.lineno, f"{base}.{a.name}") for a in node.names)


def internal(name: str) -> str | None:
    """The table's spelling of an imported name of this project, None for foreign ones."""
    if name == "afl" or name.startswith("afl."):
        return name[4:]
    if name == "afl_cli" or name.startswith("afl_cli."):
        return "cli" + name[7:]
    return None
