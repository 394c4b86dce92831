"""The one place that imports the vendor's package."""

import functools
import importlib
from types import ModuleType


@functools.cache
def vendor_package() -> ModuleType | None:
    """torch_npu, imported now, or None where it is not installed or its libraries are missing.

    The answer never changes in a process: after None the vendor's operators may be defined by others.
    """
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError):
        return None
