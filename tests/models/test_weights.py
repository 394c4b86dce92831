"""Parameters from checkpoints: placement, strictness, tied heads, memory."""

import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import save_file

from afl import tree
from afl.errors import CheckpointError
from afl.layout import ND, Layout, plain
from afl.models.checkpoint import Checkpoint, open_checkpoint
from afl.models.spec import ParamSpec
from afl.models.weights import load_params, plan_load, random_params, tied_head
from afl.ops.panels import PANEL
from afl.tree import struct

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
AT = "model.layers.0."


@struct
class Layer:
    qkv: ParamSpec
    norm: ParamSpec
    down: ParamSpec


@struct
class Params:
    embed: ParamSpec
    layers: tuple[Layer, ...]
    head: ParamSpec | None


def spec(head: bool = True) -> Params:
    qkv = ParamSpec((11, 5), "linear.weight", tuple(f"{AT}self_attn.{x}_proj.weight" for x in "qkv"), parts=(5, 3, 3))
    down = ParamSpec((5, 14), "linear.weight", (AT + "mlp.a.weight", AT + "mlp.b.weight"), cat=1, parts=(7, 7))
    norm = ParamSpec((5,), "norm.gamma", (AT + "norm.weight",), dtype="float32", init="ones")
    embed = ParamSpec((17, 5), "embed.weight", (EMBED,))
    return Params(embed, (Layer(qkv, norm, down),), ParamSpec((17, 5), "head.weight", (HEAD,)) if head else None)


def weights(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {EMBED: (17, 5), HEAD: (17, 5), AT + "norm.weight": (5,), AT + "mlp.a.weight": (5, 7),
              AT + "mlp.b.weight": (5, 7), AT + "self_attn.q_proj.weight": (5, 5),
              AT + "self_attn.k_proj.weight": (3, 5), AT + "self_attn.v_proj.weight": (3, 5)}
    made = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()} | changes
    return {k: v for k, v in made.items() if v is not None}


def saved(tmp: Path, content: dict[str, torch.Tensor]) -> Checkpoint:
    (tmp / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    save_file(content, tmp / "model.safetensors")
    return open_checkpoint(tmp)


COLUMNS = attrs.evolve(ND, name="columns", empty=lambda shape, dtype: torch.empty(shape[::-1], dtype=dtype).T)


def plain_of(role: str) -> Layout:
    return ND


def columns_of(role: str) -> Layout:
    return COLUMNS if role == "linear.weight" else ND


def panels_of(role: str) -> Layout:
    return PANEL if role == "head.weight" else ND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout_of", [plain_of, columns_of, panels_of])
def test_sources_fill_their_slices_of_the_destination(tmp_path, dtype, layout_of):
    w = weights()
    c = saved(tmp_path, w)
    before = json.dumps(c.config)
    seen = []
    p, report = load_params(spec(), c, dtype=dtype, layout_of=layout_of, progress=lambda *step: seen.append(step))
    layer = p.layers[0]
    assert torch.equal(layer.qkv, torch.cat([w[f"{AT}self_attn.{x}_proj.weight"] for x in "qkv"]).to(dtype))
    assert torch.equal(layer.down, torch.cat([w[AT + "mlp.a.weight"], w[AT + "mlp.b.weight"]], 1).to(dtype))
    assert layer.norm.dtype == torch.float32 and torch.equal(layer.norm, w[AT + "norm.weight"])
    assert torch.equal(plain(p.head), w[HEAD].to(dtype))
    assert layer.down.stride() == ((1, 5) if layout_of is columns_of else (14, 1))
    assert report.param_bytes == tree.size_of(p) == seen[-1][0] == seen[-1][1] and report.tensors == 8
    assert json.dumps(c.config) == before


@pytest.mark.parametrize("change, messages", [
    ({AT + "norm.weight": None}, ["layers.0.norm", AT + "norm.weight", "[5]"]),
    ({AT + "mlp.b.weight": torch.ones(5, 6)}, ["F32[5, 6]", "model.safetensors", "layers.0.down", "[5, 7]"]),
    ({AT + "mlp.b.weight": torch.ones(5, 7, dtype=torch.int8)}, ["I8[5, 7]", "layers.0.down", "one of float64"]),
    ({AT + "self_attn.q_norm.weight": torch.ones(5)}, [AT + "self_attn.q_norm.weight", "not used"]),
    ({AT + "self_attn.q_proj.bias": torch.ones(5)}, [AT + "self_attn.q_proj.bias", "not used"]),
    ({EMBED: None, AT + "norm.weight": torch.ones(6)}, ["2 problems", EMBED, "F32[6]"]),
])
def test_what_does_not_fit_is_named_before_anything_is_read(tmp_path, change, messages):
    c = saved(tmp_path, weights(**change))
    with pytest.raises(CheckpointError) as e:
        load_params(spec(), c, dtype=torch.float32, layout_of=lambda role: pytest.fail("read before checked"))
    assert all(m in str(e.value) for m in messages), str(e.value)


def test_left_out_tensors_are_listed_with_a_reason(tmp_path):
    names = (AT + "self_attn.rotary_emb.inv_freq", "vision.w", AT + "mtp.x")
    extra = {name: torch.ones(2) for name in names}
    c = saved(tmp_path, weights() | extra)
    _, report = load_params(spec(), c, dtype=torch.float32, ignore={r"model\.layers\.\d+\.mtp\..*": "draft only"})
    assert report.ignored == {
        AT + "mtp.x": "draft only", AT + "self_attn.rotary_emb.inv_freq": "computed from the config",
        "vision.w": "unknown to this model",
    }
    assert len(report.notices) == 1 and "vision.w" in report.notices[0]
    with pytest.raises(CheckpointError, match="mtp.x"):
        plan_load(spec(), c.tensors)


def test_a_wholly_foreign_checkpoint_gives_a_short_error(tmp_path):
    c = saved(tmp_path, {f"model.layers.0.x.{i}": torch.ones(1) for i in range(300)})
    with pytest.raises(CheckpointError) as e:
        plan_load(spec(), c.tensors)
    assert len(str(e.value).splitlines()) < 30 and "more" in str(e.value)


@pytest.mark.parametrize("config_tied, head, tied, notice", [
    (True, "other", False, "differs"), (True, "equal", True, None), (True, None, True, None),
    (False, "other", False, None), (False, "equal", False, None), (False, None, True, "has no lm_head.weight"),
    (True, "shape", False, "differs"),
])
def test_the_file_decides_about_the_head(tmp_path, config_tied, head, tied, notice):
    w = weights()
    w[HEAD] = {"other": w[HEAD], "equal": w[EMBED].clone(), None: None, "shape": torch.ones(3)}[head]
    c = saved(tmp_path, {k: v for k, v in w.items() if v is not None})
    got, said = tied_head(config_tied, c)
    assert got is tied and (said is None) == (notice is None) and (notice or "") in (said or "")
    if head != "shape":
        p, report = load_params(spec(head=not got), c, dtype=torch.float32)
        assert (p.head is None) == got
        assert torch.equal(p.embed if p.head is None else p.head, w[EMBED] if got else w[HEAD])
        assert (HEAD in report.ignored) == (got and head == "equal")


def test_random_parameters_repeat_and_follow_the_spec():
    a, b = (random_params(spec(), 3, torch.float32, columns_of) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))
    assert not torch.equal(a.embed, random_params(spec(), 4, torch.float32).embed)
    assert torch.equal(a.layers[0].norm, torch.ones(5)) and a.layers[0].qkv.stride() == (1, 11)


MEASURE = """
import sys, threading, time
from pathlib import Path
import gguf, tokenizers, torch
from afl.models.checkpoint import open_checkpoint
from afl.models.spec import ParamSpec
from afl.models.weights import load_params

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
torch.ones(1 << 20).add_(1).to(torch.bfloat16)
base = peak = anonymous()
def look(done, total):
    global peak
    peak = max(peak, anonymous())
running = True
def watch():
    while running:
        look(0, 0)
        time.sleep(0.005)
thread = threading.Thread(target=watch)
thread.start()
c = open_checkpoint(sys.argv[1])
spec = {n: ParamSpec(i.shape, "linear.weight", (n,)) for n, i in c.tensors.items()}
params, report = load_params(spec, c, dtype=getattr(torch, sys.argv[2]), progress=look)
running = False
thread.join()
print((peak - base) / report.param_bytes)
"""


def measured(path: Path, dtype: str) -> float:
    run = subprocess.run([sys.executable, "-c", MEASURE, str(path), dtype], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


def test_loading_and_converting_needs_little_more_than_the_parameters(tmp_path):
    saved(tmp_path, {f"model.layers.{i}.w": torch.zeros(2048, 2048) for i in range(6)})
    assert measured(tmp_path, "bfloat16") < 1.15


@pytest.mark.real
def test_loading_smollm2_needs_little_more_than_the_parameters():
    from afl.models.locate import locate

    assert measured(locate("smollm2", {}), "float32") < 1.3
