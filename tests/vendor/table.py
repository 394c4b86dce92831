"""Writes afl/ops/emu/schemas.py from the installed torch_npu: the rows that it has, plus the operators named.

    .venv-vendor/bin/python tests/vendor/table.py npu::npu_swiglu atb::_npu_reshape_and_cache ...

A name without overload stands for all of its overloads.  Run it where the stub libraries are loaded (see stub.py).
"""

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import torch

TARGET = Path(__file__).parents[2] / "afl" / "ops" / "emu" / "schemas.py"

HEAD = '''"""Schemas of the vendor operators that afl emulates or calls, as torch_npu {version} declares them.

Written by tests/vendor/table.py; `make vendor-check` compares every row with the real one.
"""

import re

_TEXT = """
{rows}
"""


def _rows(text: str) -> dict[str, str]:
    """Name (with overload) -> schema; a row goes on over indented lines."""
    joined = re.sub(r"\\n +", " ", text.strip())
    return {{s.partition("(")[0]: s for s in joined.split("\\n")}}


SCHEMAS: dict[str, str] = _rows(_TEXT)
'''


def vendor_schemas() -> dict[str, str]:
    """Name with overload -> schema text of everything that torch_npu has registered in its two namespaces."""
    out = {}
    for s in torch._C._jit_get_all_schemas():
        if s.name.startswith(("npu::", "atb::")):
            out[s.name + (f".{s.overload_name}" if s.overload_name else "")] = short(str(s))
    return out


def short(schema: str) -> str:
    """The schema with numbers as people write them: 1e-06 for 9.9999999999999995e-07; the parsed value is the same."""
    return re.sub(r"(?<==)\d[\d.]*e[-+]\d+|(?<==)\d+\.\d{6,}", lambda m: repr(float(m[0])), schema)


def main(names: list[str]) -> None:
    """Rewrite the table."""
    real = vendor_schemas()
    spec = importlib.util.spec_from_file_location("present", TARGET)
    if TARGET.exists() and spec and spec.loader:
        present = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(present)
        names = [*names, *present.SCHEMAS]
    chosen = {full for full in real for n in names if n in (full, full.partition(".")[0])}
    unknown = [n for n in names if not any(n in (full, full.partition(".")[0]) for full in real)]
    if unknown:
        sys.exit(f"torch_npu {version()} has no {', '.join(unknown)}; nothing was written")
    rows = [textwrap.fill(real[n], 118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            for n in sorted(chosen)]
    TARGET.write_text(HEAD.format(version=version(), rows="\n".join(rows)))
    print(f"{TARGET.name}: {len(rows)} schemas of torch_npu {version()}")


def version() -> str:
    """Version of the installed torch_npu, without its local part."""
    import torch_npu

    return torch_npu.__version__.partition("+")[0]


if __name__ == "__main__":
    version()
    main(sys.argv[1:])
