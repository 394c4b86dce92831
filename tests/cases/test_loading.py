"""Bug log, parts C and I: configs, heads, shards, head sizes, shared state, imports, chips, options, memory."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import afl
from afl.errors import CheckpointError, ConfigError
from afl.layout import plain

PROMPT = [5, 6, 7, 8]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def changed(folder, into, weights=None, **config) -> Path:
    """A copy of the checkpoint with changed tensors (None removes one) and settings."""
    new = Path(shutil.copytree(folder, into))
    if weights is not None:
        content = {**load_file(new / "model.safetensors"), **weights}
        content = {k: v.clone() for k, v in content.items() if v is not None}
        save_file(content, new / "model.safetensors", {"format": "pt"})
    path = new / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return new


def rope(settings, **config):
    return afl.random_model("LlamaForCausalLM", settings | config).c.rope


# ---- C01 ----------------------------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_c01_yarn_without_an_original_length_takes_the_models_own(settings, where):
    short = {"rope_type": "yarn", "factor": 2.0}
    whole = short | {"original_max_position_embeddings": settings["max_position_embeddings"]}
    assert rope(settings, **{where: short}) == rope(settings, **{where: whole}) != rope(settings)


@pytest.mark.parametrize("key", [k for k in LLAMA3 if k != "rope_type"])
def test_c01_a_missing_factor_is_named(settings, key):
    with pytest.raises(ConfigError, match=key):
        rope(settings, rope_scaling={k: v for k, v in LLAMA3.items() if k != key})


@pytest.mark.parametrize("plain", [None, {"rope_type": "default"}, {"type": "default"}, {}, {"rope_type": None}])
def test_c01_default_and_null_are_plain_rotation(settings, plain):
    got = rope(settings, rope_scaling=plain, rope_theta=5000.0)
    want = 5000.0 ** (-np.arange(4) / 4.0)
    assert got.scale == 1.0 and np.allclose(got.inv_freq, want, rtol=1e-12)


@pytest.mark.parametrize(
    "given", [LLAMA3, {"rope_type": "linear", "factor": 3.0}, {"rope_type": "yarn", "factor": 2.0}]
)
def test_c01_both_spellings_of_the_kind_are_equal(settings, given):
    old = {"type" if k == "rope_type" else k: v for k, v in given.items()}
    assert rope(settings, rope_scaling=old) == rope(settings, rope_scaling=given) != rope(settings)


def test_c01_an_unknown_kind_is_refused_at_load(llama, tmp_path):
    bad = changed(llama, tmp_path / "m", rope_parameters={"rope_type": "yarm", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ConfigError, match="yarm.*yarn"):
        afl.load(bad)


# ---- C03 ----------------------------------------------------------------------------------------------------------


def last_logits(model, ids=PROMPT):
    (done,) = model.generate([ids], max_tokens=1, logprobs=-1, ignore_eos=True)
    return [p for _, p in sorted(done.logprobs[0].top)]


def theirs(folder, ids=PROMPT):
    peer = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        return peer(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1).tolist()


def test_c03_a_tied_config_with_another_head_in_the_file_uses_the_file_and_warns(llama, tmp_path):
    model = afl.load(changed(llama, tmp_path / "m", tie_word_embeddings=True))
    assert model.params.head is not None and any("differs" in n for n in model.notices)
    assert last_logits(model) == pytest.approx(theirs(llama), abs=1e-4)


def test_c03_a_tied_config_with_an_equal_copy_shares_it(llama, tmp_path):
    w = load_file(llama / "model.safetensors")
    own = changed(llama, tmp_path / "m", {HEAD: w[EMBED]}, tie_word_embeddings=True)
    model = afl.load(own)
    assert model.params.head is None and not any("head" in n for n in model.notices)
    assert last_logits(model) == pytest.approx(theirs(own), abs=1e-4)


def test_c03_an_untied_config_without_a_head_ties_and_warns(llama, tmp_path):
    model = afl.load(changed(llama, tmp_path / "m", {HEAD: None}))
    assert model.params.head is None and any(HEAD in n for n in model.notices)
    tied = changed(llama, tmp_path / "tied", {HEAD: None}, tie_word_embeddings=True)
    assert last_logits(model) == pytest.approx(theirs(tied), abs=1e-4)


# ---- C04 ----------------------------------------------------------------------------------------------------------


def sharded(folder, into, extra=None) -> Path:
    """The checkpoint in two shards with an index."""
    new = Path(shutil.copytree(folder, into))
    w = {**load_file(new / "model.safetensors"), **(extra or {})}
    (new / "model.safetensors").unlink()
    names = sorted(w)
    index = {n: f"model-{1 + i % 2}-of-2.safetensors" for i, n in enumerate(names)}
    for shard in sorted(set(index.values())):
        save_file({n: w[n] for n in names if index[n] == shard}, new / shard)
    (new / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return new


def test_c04_shards_load_like_one_file(llama, text_model, tmp_path):
    assert last_logits(afl.load(sharded(llama, tmp_path / "m"))) == last_logits(text_model)


def test_c04_a_missing_shard_is_named_with_its_tensors(llama, tmp_path):
    m = sharded(llama, tmp_path / "m")
    (m / "model-2-of-2.safetensors").unlink()
    index = json.loads((m / "model.safetensors.index.json").read_text())["weight_map"]
    lost = [n for n, f in index.items() if f.startswith("model-2")]
    with pytest.raises(CheckpointError, match="model-2-of-2.safetensors") as e:
        afl.load(m)
    assert any(n in str(e.value) for n in lost)


def test_c04_a_tensor_that_its_shard_lacks_is_named(llama, tmp_path):
    m = sharded(llama, tmp_path / "m")
    shard = m / "model-1-of-2.safetensors"
    content = load_file(shard)
    gone = sorted(content)[0]
    save_file({k: v for k, v in content.items() if k != gone}, shard)
    with pytest.raises(CheckpointError, match="model-1-of-2.safetensors") as e:
        afl.load(m)
    assert gone in str(e.value)


def test_c04_extra_tensors_are_reported_or_refused_and_none_is_silently_lost(llama, text_model, tmp_path):
    model = afl.load(sharded(llama, tmp_path / "m", {"vision.tower.weight": torch.ones(3)}))
    assert any("vision.tower.weight" in n for n in model.notices) and last_logits(model) == last_logits(text_model)
    with pytest.raises(CheckpointError, match="model.layers.0.mlp.gate_proj.bias"):
        afl.load(sharded(llama, tmp_path / "b", {"model.layers.0.mlp.gate_proj.bias": torch.ones(48)}))


def test_c04_no_parameter_stays_uninitialised(llama, tmp_path):
    w = load_file(llama / "model.safetensors")
    for name in (EMBED, "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        folder = tmp_path / name
        with pytest.raises(CheckpointError, match=name):
            afl.load(changed(llama, folder, {name: None}))
    assert len(w) > 3


# ---- C05 ----------------------------------------------------------------------------------------------------------


def test_c05_heads_that_do_not_divide_the_hidden_size(settings):
    sizes = dict(hidden_size=1792, num_attention_heads=24, num_key_value_heads=8, head_dim=128, num_hidden_layers=1)
    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        model = afl.random_model(name, settings | sizes)
        shapes = {tuple(x.shape) for x in afl.tree.leaves(model.params.layers[0])}
        assert {(3072 + 2 * 1024, 1792), (1792, 3072)} <= shapes
        assert model.caches[0].block_bytes(16, torch.float32) == 2 * 16 * 8 * 128 * 4
        assert len(model.generate([PROMPT], max_tokens=3)[0].token_ids) == 3


def test_c05_logits_equal_the_fields(tmp_path):
    sizes = dict(hidden_size=56, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    folder = tiny.folder(tmp_path / "m", "qwen3", **sizes)
    assert last_logits(afl.load(folder)) == pytest.approx(theirs(folder), abs=1e-4)


# ---- C18 ----------------------------------------------------------------------------------------------------------


def test_c18_two_models_in_one_process_share_nothing(llama, settings):
    first = afl.load(llama)
    want = last_logits(first)
    second = afl.load(llama, dtype="bfloat16")
    assert last_logits(second) != want
    assert last_logits(first) == want == last_logits(afl.load(llama))
    a = {x.data_ptr() for x in afl.tree.leaves(first.params)}
    assert not a & {x.data_ptr() for x in afl.tree.leaves(second.params)}
    assert {x.dtype for x in afl.tree.leaves(second.params)} != {x.dtype for x in afl.tree.leaves(first.params)}


def test_c18_loading_and_running_leave_the_config_alone(llama, settings):
    given = settings | {"rope_scaling": dict(LLAMA3), "architectures": ["LlamaForCausalLM"]}
    before = copy.deepcopy(given)
    afl.random_model("LlamaForCausalLM", given).generate([PROMPT], max_tokens=2)
    afl.random_model("Qwen3ForCausalLM", given, dtype="bfloat16").generate([PROMPT], max_tokens=2)
    assert given == before
    from afl.run.load import outline

    found = outline(llama)
    held = copy.deepcopy(found.checkpoint.config), copy.deepcopy(found.checkpoint.generation_config)
    found.read().generate([PROMPT], max_tokens=2)
    afl.load(llama, dtype="float16").generate([PROMPT], max_tokens=2)
    assert (found.checkpoint.config, found.checkpoint.generation_config) == held


# ---- I01, I02, I04 ------------------------------------------------------------------------------------------------


def clean(*arguments, site: Path | None = None, **more) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"} | more
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    command = [sys.executable, "-m", "afl_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_i01_an_answer_on_the_cpu_though_a_vendor_backend_cannot_load(llama, tmp_path):
    info = tmp_path / "vendor_backend-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nvendor = vendor_backend:autoload\n")
    (tmp_path / "vendor_backend.py").write_text("def autoload():\n    raise ImportError('libvendor.so: cannot open')\n")
    done = clean("run", "--model", llama, "the cat", "--json", "--max-tokens", 3, "--ignore-eos", site=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 3 and "libvendor" not in done.stderr


def test_i01_a_chip_without_its_device_is_emulated_and_said_so(tmp_path):
    model = tiny.folder(tmp_path, "llama", head_dim=16)
    done = clean("run", "--model", model, "the cat", "--json", "--max-tokens", 3, "--ignore-eos", "--chip", "a3")
    assert done.returncode == 0 and "chip a3 is emulated on this host" in done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 3


def test_i02_an_unknown_chip_is_refused_in_the_first_second_with_the_list(llama):
    code = ("import sys, resource, afl_cli.main as m\n"
            "try: m.main()\nexcept SystemExit as e:\n"
            "    u = resource.getrusage(resource.RUSAGE_SELF)\n"
            "    print(e.code, 'torch' in sys.modules, u.ru_utime + u.ru_stime)")
    run = [sys.executable, "-c", code, "run", "x", "--chip", "a9", "--model", str(llama)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    status, torch_there, seconds = done.stdout.split()
    assert (status, torch_there) == ("2", "False") and float(seconds) < 1
    assert "unknown chip 'a9'" in done.stderr and "cpu" in done.stderr
    with pytest.raises(ConfigError, match="unknown chip 'a9'.*cpu"):
        afl.load(llama, chip="a9")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_i02_the_dtype_of_a_checkpoint_is_converted_by_a_stated_rule(llama, cli, tmp_path, stored):
    """auto is the chip's first dtype, whatever the file holds; a dtype that the chip lacks is refused by name."""
    w = {k: v.to(stored) for k, v in load_file(llama / "model.safetensors").items()}
    folder = changed(llama, tmp_path / "m", w, dtype=str(stored).removeprefix("torch."))
    assert "auto is the chip's first" in " ".join(cli("run", "--help").stdout.split())
    model = afl.load(folder)
    assert model.dtype == torch.float32 and model.params.embed.dtype == torch.float32
    assert torch.equal(plain(model.params.embed), w[EMBED].float())
    for wish in ("float32", "bfloat16", "float16"):
        assert len(afl.load(folder, dtype=wish).generate([PROMPT], max_tokens=2, ignore_eos=True)[0].token_ids) == 2
    with pytest.raises(ConfigError, match="float64.*float32, bfloat16, float16"):
        afl.load(folder, dtype="float64")


def test_i04_misspelt_options_and_variables_name_the_nearest(cli, monkeypatch, llama):
    for wrong, right in (("--max-token", "--max-tokens"), ("--kv-block", "--kv-blocks"), ("--top-pp", "--top-p")):
        result = cli("run", "x", wrong, 3)
        assert result.exit_code == 2 and right in result.stderr
    with pytest.raises(ConfigError, match="'max_seq'.*'max_seqs'"):
        afl.load(llama, max_seq=3)
    from afl.config import ENVIRONMENT

    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
    assert "AFL_" not in cli("chips").stderr
    monkeypatch.setenv("AFL_PLUGNS", "off")
    assert "AFL_PLUGNS is not known; did you mean AFL_PLUGINS?" in cli("chips").stderr


# ---- memory -------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, threading, time
from pathlib import Path
import gguf, tokenizers, torch
import afl
import afl.run.engine, afl.run.load

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
torch.ones(1 << 20).add_(1).to(torch.bfloat16)
base = peak = anonymous()
running = True
def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
def look(done, total):
    global peak
    peak = max(peak, anonymous())
model = afl.load(sys.argv[1], dtype=sys.argv[2], progress=look)
running = False
thread.join()
print((max(peak, anonymous()) - base) / model.param_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("stored, dtype", [(torch.bfloat16, "float32"), (torch.float32, "bfloat16")])
def test_loading_a_folder_needs_little_more_than_its_parameters(tmp_path, stored, dtype):
    """`afl.load` with the chip's layouts on some 100 MB of weights; below 1.3 times the bytes of the parameters."""
    sizes = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, head_dim=64, num_attention_heads=16,
                 num_key_value_heads=4, vocab_size=4000)
    folder = tiny.folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    d, f, kv, v = 1024, 2816, 256, 4000
    w = {EMBED: (v, d), HEAD: (v, d), "model.norm.weight": (d,)}
    for i in range(3):
        at = f"model.layers.{i}."
        w |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,)}
        w |= {f"{at}self_attn.{n}_proj.weight": s for n, s in dict(q=(d, d), k=(kv, d), v=(kv, d), o=(d, d)).items()}
        w |= {f"{at}mlp.{n}_proj.weight": s for n, s in dict(gate=(f, d), up=(f, d), down=(d, f)).items()}
    save_file({k: torch.zeros(s, dtype=stored) for k, s in w.items()}, folder / "model.safetensors")
    run = [sys.executable, "-c", MEASURE, str(folder), dtype]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.3
