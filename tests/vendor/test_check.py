"""The check against torch_npu finds what it is there to find."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / ".venv-vendor" / "bin" / "python"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vendor_check", ROOT / "tests" / "vendor" / "check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- schemas and calls, without the vendor's package ---------------------------------------------------------------

REAL = {n: torch._C.parse_schema(s) for n, s in {
    "npu::turn": "npu::turn(Tensor x, Tensor cos, *, str mode=\"half\", int[]? lens=None) -> Tensor",
    "npu::turn.out": "npu::turn.out(Tensor x, Tensor cos, *, str mode=\"half\", Tensor(a!) out) -> Tensor(a!)",
    "atb::_put": "atb::_put(Tensor k, Tensor(a!) cache, int heads=1) -> ()",
}.items()}


@pytest.mark.parametrize(("text", "why"), [
    ("npu.turn(x, c, mode='pair', lens=[1])", None), ("npu.turn(x, cos=c)", None), ("npu.turn.out(x, c, out=y)", None),
    ("torch.ops.npu.turn.default(x, c)", None), ("npu.turn(*args)", None), ("npu.turn(x, c, **more)", None),
    ("atb._put(k, cache, 4)", None),
    ("npu.spin(x)", "torch_npu has no npu::spin"),
    ("npu.turn(x, c, rotary='half')", "no argument rotary"),
    ("npu.turn(x, c, 'half')", "3 positional arguments, it takes 2"),
    ("npu.turn(x)", "lacks cos"), ("npu.turn(x, c, x=y)", "x given twice"), ("npu.turn.out(x, c)", "lacks out"),
    ("npu.turn.outs(x, c)", "torch_npu has no npu::turn.outs"), ("torch.ops.atb._put(k)", "lacks cache"),
])
def test_a_call_in_the_text_must_fit_a_schema(check: ModuleType, tmp_path: Path, text: str, why: str | None):
    (tmp_path / "afl").mkdir()
    (tmp_path / "afl" / "kernels.py").write_text(f"def kernel(x, c):\n    return {text}\n")
    calls = list(check.vendor_calls(tmp_path / "afl"))
    assert len(calls) == 1
    found = check.refused(calls[0], REAL)
    assert found is None if why is None else found.startswith("afl/kernels.py:2: ") and why in found


def test_calls_of_others_are_not_vendor_calls(check: ModuleType, tmp_path: Path):
    lines = "npu.a.b.c(1)", "x.npu.turn(1)", "torch.npu.synchronize()", "torch.ops.aten.add(1)", "f(npu)"
    (tmp_path / "x.py").write_text("\n".join(lines))
    assert list(check.vendor_calls(tmp_path)) == []


def test_a_row_that_differs_from_the_real_schema_is_found(check: ModuleType, monkeypatch: pytest.MonkeyPatch):
    rows = {n: str(s) for n, s in REAL.items()}
    monkeypatch.setattr(check, "SCHEMAS", rows)
    assert list(check.differing_schemas(REAL)) == []
    for old, new in (('"half"', '"pair"'), ("Tensor x", "Tensor y"), ("int[]? lens=None", "int[]? lens"),
                     ("*, ", ""), ("-> Tensor", "-> (Tensor, Tensor)")):
        monkeypatch.setattr(check, "SCHEMAS", rows | {"npu::turn": rows["npu::turn"].replace(old, new)})
        found = list(check.differing_schemas(REAL))
        assert len(found) == 1 and found[0].startswith("npu::turn: torch_npu declares")
    monkeypatch.setattr(check, "SCHEMAS", rows | {"npu::gone": "npu::gone(Tensor x) -> Tensor"})
    assert list(check.differing_schemas(REAL)) == ["npu::gone: torch_npu has no such operator"]


def test_a_mismatch_makes_the_report_fail_and_a_known_one_does_not(check: ModuleType):
    def row(*problems: str, calls: tuple[str, ...] = ("npu::a",)) -> dict[str, Any]:
        return {"cases": 2, "calls": list(calls), "problems": list(problems)}

    kernels = {
        "norm/good": row(), "norm/half": row(calls=("npu::a", "atb::b")), "norm/plain": row(calls=()),
        "norm/known": row("case 0 in f16: known: its shapes are wrong; ..."), "norm/bad": row("case 1 in f16: x"),
    }
    lines, wrong = check.report({
        "chip": "a9", "soc": "S", "soc_id": 1, "kernels": kernels, "with_shapes": ["npu::a"], "formats": ["nz"],
        "storage": ["layout nz: 8 bytes, torch_npu takes 512"],
    })
    assert lines[0].startswith("a9 (S, vendor id 1): 3 of 4 vendor-calling kernels agree in 8 cases, 2 of them in")
    assert "without vendor call: norm/plain" in lines[1] and "norm/known" in lines[2]
    assert wrong == ["a9 norm/bad case 1 in f16: x", "layout nz: 8 bytes, torch_npu takes 512"]


# ---- kernels over the real package ---------------------------------------------------------------------------------

PLUGIN = '''
"""A chip with right and wrong kernels, and wrong emulations of three operators."""

import torch

from afl import layout
from afl.chip import Chip, register
from afl.ir.kernel import kernel
from afl.ops.act import swiglu
from afl.ops.attention import write_kv
from afl.ops.emu import register as emu

register(Chip(name="toy", soc=("Ascend950PR_9599",), features=frozenset({"toy"}), dtypes=("bfloat16",)))
npu, atb = torch.ops.npu, torch.ops.atb
emu.load()
for name in ("npu::npu_swiglu", "npu::npu_fast_gelu", "npu::npu_rms_norm", "npu::npu_incre_flash_attention",
             "atb::_npu_reshape_and_cache"):
    emu.IMPLEMENTATIONS.pop(name, None)


@emu.emulate("npu::npu_swiglu")
def _(input, dim=-1):
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


@emu.emulate("npu::npu_fast_gelu")
def _(input):
    return input.float()                                    # the vendor keeps the dtype


@emu.emulate("npu::npu_rms_norm")
def _(input, gamma, epsilon=1e-6):
    return input, input[..., 0].float()                     # the vendor keeps a last dimension of 1


@emu.emulate("npu::npu_incre_flash_attention")          # the vendor does not run it on this chip
def _(
    query, key, value, *, padding_mask=None, atten_mask=None, pse_shift=None, actual_seq_lengths=None,
    antiquant_scale=None, antiquant_offset=None, block_table=None, dequant_scale1=None, quant_scale1=None,
    dequant_scale2=None, quant_scale2=None, quant_offset2=None, kv_padding_size=None, num_heads=1, scale_value=1.0,
    input_layout="BSH", num_key_value_heads=0, block_size=0, inner_precise=1,
):
    return torch.zeros_like(query)


@emu.emulate("atb::_npu_reshape_and_cache")
def _(key, value, key_cache, value_cache, slot_indices):
    real = slot_indices >= 0
    key_cache.flatten(0, 1)[slot_indices[real].long()] = key[real]
    value_cache.flatten(0, 1)[slot_indices[real].long()] = value[real]


def toy(fn):
    return kernel(swiglu, needs={"toy"}, name=fn.__name__)(fn)


@toy
def right(x):
    return npu.npu_swiglu(x)


@toy
def plain(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@toy
def wrong_dtype(x):
    return npu.npu_swiglu(npu.npu_fast_gelu(x).to(x.dtype))


@toy
def wrong_shape(x):
    npu.npu_rms_norm(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))
    return npu.npu_swiglu(x)


@toy
def reads_a_value(x):
    return npu.npu_swiglu(x) * x.float().mean().item()


@toy
def meets_a_host_tensor(x):
    return npu.npu_swiglu(x) * torch.ones(3, dtype=x.dtype)[:1]


@toy
def looks_at_the_device(x):
    return npu.npu_swiglu(x) if x.device.type != "npu" else npu.npu_fast_gelu(x)


@toy
def skips_a_call(x):
    y = npu.npu_swiglu(x)
    return npu.npu_swiglu(x) if x.device.type != "npu" else y


@toy
def not_on_this_chip(x):
    wide = x.flatten(0, -2)[:, None]
    npu.npu_incre_flash_attention(wide, wide, wide)
    return npu.npu_swiglu(x)


@kernel(write_kv, needs={"toy"}, inplace={0: "k_cache", 1: "v_cache"})
def writes(k_cache, v_cache, k, v, slot):
    atb._npu_reshape_and_cache(k, v, k_cache, v_cache, slot)
    return k_cache, v_cache


@kernel(write_kv, needs={"toy"}, inplace={0: "k_cache", 1: "v_cache"})
def writes_from_the_host(k_cache, v_cache, k, v, slot):
    host = torch.zeros(slot.shape, dtype=slot.dtype)
    atb._npu_reshape_and_cache(k, v, k_cache, v_cache, host)
    return k_cache, v_cache


emu.register()
layout.register(layout.Layout("unpadded", "nz", lambda shape, dtype: torch.empty(shape, dtype=dtype), layout.put_rows,
                              lambda x: x.contiguous(), layout.strided_bytes))
'''

FINDS = {
    "swiglu/right": None, "swiglu/plain": None, "write_kv/writes": None,
    "swiglu/wrong_dtype": "npu::npu_fast_gelu gives (bf16", "swiglu/wrong_shape": "npu::npu_rms_norm gives (bf16",
    "swiglu/reads_a_value": "DataDependentOutputException", "swiglu/meets_a_host_tensor": "device",
    "swiglu/looks_at_the_device": "vendor call 1 is npu::npu_fast_gelu, on CPU it is npu::npu_swiglu",
    "swiglu/not_on_this_chip": "by host code: RuntimeError: Interface npu_incre_flash_attention is no longer supported",
    "swiglu/skips_a_call": "1 vendor calls, on CPU 2",
    "write_kv/writes_from_the_host": "needs slot_indices on npu, it is on cpu",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What fake_chip.py says about the plugin's chip."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "toy_npu.py").write_text(PLUGIN.lstrip())
    info = folder / "toy_npu-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_npu\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[afl.plugins]\ntoy = toy_npu\n")
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT / "tests" / "ops", folder)))
    env = os.environ | {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(VENDOR.parents[1] / "cann")}
    env |= {"CANN_STUB_SOC": "Ascend950PR_9599"}
    command = [str(VENDOR), "-W", "ignore", "tests/vendor/fake_chip.py", "toy"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not VENDOR.exists(), reason="`make vendor-check` makes the environment")
@pytest.mark.parametrize("kernel", FINDS)
def test_a_kernel_is_compared_with_the_real_package(found: dict[str, Any], kernel: str):
    problems, why = found["kernels"][kernel]["problems"], FINDS[kernel]
    assert problems == [] if why is None else problems and all(why in p for p in problems)
    assert set(found["kernels"]) >= set(FINDS) and (found["soc"], found["soc_id"]) == ("Ascend950PR_9599", 260)
    assert "npu::npu_swiglu" in found["with_shapes"] and "atb::_npu_reshape_and_cache" not in found["with_shapes"]


@pytest.mark.skipif(not VENDOR.exists(), reason="`make vendor-check` makes the environment")
def test_bytes_of_a_stored_matrix_are_compared_with_the_real_package(found: dict[str, Any]):
    wrong = [p for p in found["storage"] if p.startswith("layout unpadded ")]
    assert wrong == found["storage"]
    assert "layout unpadded of torch.bfloat16 (20, 18): (720, 720) bytes, torch_npu takes 2048" in wrong
    assert not any("(16, 16)" in p for p in wrong), "a whole fractal needs no padding"


def test_a_report_on_graphs_fails_for_a_call_that_is_lost_and_for_a_refusal_without_its_equation(check: ModuleType):
    good = {"chip": "a2", "captures": True, "tables": [], "problems": [], "launches": {"greedy": ["A", "B"]}}
    assert check.graph_report(good)[1] == [] and "greedy 2" in check.graph_report(good)[0][0]
    assert check.graph_report(good | {"problems": ["lost"]})[1] == ["a2 graphs: lost"]
    assert check.graph_report(good | {"tables": ["row"]})[1] == ["a2 graphs: row"]
    assert check.graph_report(good | {"launches": {"greedy": []}})[1]
    plan = ["<kernel linear/x> is not capturable: ..."]
    refused = {"chip": "310p", "captures": False, "tables": [], "problems_of_the_plan": plan,
               "torch_npu": "no | equation 0 of program 'product'"}
    assert check.graph_report(refused)[1] == [] and "<kernel linear/x>" in check.graph_report(refused)[0][0]
    assert check.graph_report(refused | {"torch_npu": "torch_npu captured it"})[1]
    assert check.graph_report(refused | {"problems_of_the_plan": []})[1]
