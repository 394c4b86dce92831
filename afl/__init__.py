"""afl: large language models on Ascend NPUs and CPUs, as pure functions."""

import os
import sys

if "torch" not in sys.modules:  # with torch_npu but no vendor libraries, torch's own autoload would raise
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
