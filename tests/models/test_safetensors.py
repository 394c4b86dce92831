"""safetensors files against the format's own writer, and against hostile headers."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from afl.errors import CheckpointError
from afl.layout import ND
from afl.models import tensors
from afl.models.checkpoint import open_checkpoint
from afl.models.safetensors import INDEX, open_folder

CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 3}


def folder(tmp: Path, shards: dict[str, dict[str, torch.Tensor]], index: object = None, **config) -> Path:
    (tmp / "config.json").write_text(json.dumps(CONFIG | config))
    for name, content in shards.items():
        save_file(content, tmp / name)
    if index is not None:
        (tmp / INDEX).write_text(json.dumps({"weight_map": index}))
    return tmp


def raw_file(tmp: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    n = len(text) if length is None else length
    (tmp / "config.json").write_text(json.dumps(CONFIG))
    (tmp / "model.safetensors").write_bytes(n.to_bytes(8, "little") + text + data)
    return tmp


def some_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    floats = {
        f"w.{d}": torch.randn(5, 7, generator=g).to(d)
        for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    return floats | {
        "ids": torch.arange(11), "byte": torch.arange(13, dtype=torch.uint8), "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3), "cube": torch.randn(2, 3, 5, generator=g),
    }


def test_every_dtype_and_shape_reads_back_equal(tmp_path):
    want = some_tensors()
    c = open_checkpoint(folder(tmp_path, {"model.safetensors": want}))
    assert set(c.tensors) == set(want) and c.eos_ids == (3,)
    for name, x in want.items():
        got = c.read(name)
        assert got.dtype == x.dtype and torch.equal(got, x), name
        assert c.tensors[name].shape == tuple(x.shape)


def test_data_that_is_not_aligned_is_read(tmp_path):
    x = torch.randn(3, 5)
    header = {"x": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}
    text = json.dumps(header).encode()
    text += b" " * ((-len(text) - 8) % 4 + 1)
    c = open_checkpoint(raw_file(tmp_path, text, x.numpy().tobytes()))
    assert torch.equal(c.read("x"), x)


def test_rows_are_copied_in_chunks_into_strided_and_converted_destinations(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK_ELEMENTS", 16)
    x = torch.randn(13, 7)
    c = open_checkpoint(folder(tmp_path, {"model.safetensors": {"x": x}}))
    dest, rows = torch.empty(7, 13, dtype=torch.bfloat16).T, []
    c.read_into("x", dest.dtype, lambda part, row: (rows.append(len(part)), ND.put(dest, part, row)))
    assert torch.equal(dest, x.bfloat16()) and len(rows) > 1 and sum(rows) == 13


@pytest.mark.parametrize("value", [65505.0, -1e9, float("inf"), float("nan")])
def test_float16_refuses_what_it_cannot_hold_by_name(tmp_path, value):
    x = torch.zeros(5, 3)
    x[4, 1] = value
    c = open_checkpoint(folder(tmp_path, {"model.safetensors": {"layer.w": x}}))
    with pytest.raises(CheckpointError, match="layer.w.*float16"):
        c.read_into("layer.w", torch.float16, lambda part, row: None)
    x[4, 1] = 65504
    assert float(x.half().max()) == 65504


def test_shards_are_found_by_the_index_and_extras_reported(tmp_path):
    a, b = {"x": torch.randn(3, 2)}, {"y": torch.randn(5), "z": torch.randn(2)}
    p = folder(tmp_path, {"a.safetensors": a, "b.safetensors": b}, {"x": "a.safetensors", "y": "b.safetensors"})
    c = open_checkpoint(p)
    assert torch.equal(c.read("y"), b["y"]) and torch.equal(c.read("x"), a["x"])
    assert len(c.notices) == 1 and "z" in c.notices[0]


def test_shards_may_be_links_as_in_the_hugging_face_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snap").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "blobs" / "abc")
    os.symlink("../blobs/abc", tmp_path / "snap" / "model.safetensors")
    (tmp_path / "snap" / "config.json").write_text(json.dumps(CONFIG))
    assert open_checkpoint(tmp_path / "snap").read("x").tolist() == [1, 1]


@pytest.mark.parametrize("index, message", [
    ({"x": "a.safetensors", "y": "gone.safetensors"}, "shard gone.safetensors is missing.*y"),
    ({"x": "a.safetensors", "q": "a.safetensors"}, "a.safetensors lacks 1 tensors.*q"),
    ({"x": "../a.safetensors"}, "file name inside the folder"),
    ({"x": "/etc/passwd"}, "file name inside the folder"),
    ({"x": ".."}, "file name inside the folder"),
    ({"x": "a\0.safetensors"}, "file name inside the folder"),
    ({"x": ""}, "file name inside the folder"),
    ({"x": 3}, "weight_map"),
    ([], "weight_map"),
])
def test_a_wrong_index_is_refused(tmp_path, index, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder(tmp_path, {"a.safetensors": {"x": torch.ones(3)}}, index))


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("header, data, length, message", [
    ({"x": F32}, b"\0" * 4, None, "truncated"),
    ({"x": F32}, b"\0" * 8, 1 << 62, "truncated"),
    ({"x": F32}, b"\0" * 8, 5, "JSON"),
    ({"x": F32}, b"\0" * 9, None, "belong to no tensor"),
    ({"x": F32 | {"dtype": "F99"}}, b"\0" * 8, None, "dtype 'F99'"),
    ({"x": F32 | {"dtype": ["F32"]}}, b"\0" * 8, None, "dtype"),
    ({"x": F32 | {"shape": [3]}}, b"\0" * 8, None, "takes 8 bytes, not 12"),
    ({"x": F32 | {"shape": [-2]}}, b"\0" * 8, None, "shape"),
    ({"x": F32 | {"shape": [True, 2]}}, b"\0" * 8, None, "shape"),
    ({"x": F32 | {"shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}, b"", None, "impossible shape"),
    ({"x": F32 | {"data_offsets": [8, 0]}}, b"\0" * 8, None, "lies at bytes"),
    ({"x": F32 | {"data_offsets": [-8, 0]}}, b"\0" * 8, None, "data_offsets"),
    ({"x": F32 | {"data_offsets": [0, 8, 9]}}, b"\0" * 8, None, "data_offsets"),
    ({"x": F32, "y": F32}, b"\0" * 8, None, "overlaps"),
    ({"x": F32, "y": F32 | {"data_offsets": [12, 20]}}, b"\0" * 20, None, "hole"),
    ({"x": []}, b"", None, "described by list"),
    (b"[]", b"", None, "JSON object"),
    (b"{" * 100000, b"", None, "JSON|nested"),
    (b'{"a":' + b"[" * 200000, b"", None, "nested too deeply"),
    (b'{"x": 1' + b"0" * 5000 + b"}", b"", None, "JSON"),
    (b'{"x":{},"x":{}}', b"", None, "twice"),
    (b'{"\\ud800":{}}', b"", None, "JSON"),
    (b"[" + b"[]," * 1100000 + b"[]]", b"", None, "more than"),
    (b"\xff\xfe{}", b"", None, "JSON"),
])
def test_a_corrupt_file_gives_one_clear_error(tmp_path, header, data, length, message):
    with pytest.raises(CheckpointError, match=message) as e:
        open_checkpoint(raw_file(tmp_path, header, data, length))
    assert len(str(e.value)) < 1000


@pytest.mark.parametrize("files, message", [
    ({}, "no weights"),
    ({"pytorch_model.bin": b"x", "config.json": b"{}"}, "pickled weights only.*pytorch_model.bin"),
    ({"model.safetensors": b""}, "config.json"),
    ({"model.safetensors": b"", "config.json": b"{}"}, "names no architecture"),
    ({"model.safetensors": b"", "config.json": b"[1]"}, "must be a JSON object"),
    ({"model.safetensors": b"", "config.json": b'{"architectures": "x"}'}, "names no architecture"),
    ({"model.safetensors": b"", "config.json": json.dumps(CONFIG).encode()}, "truncated"),
    ({"a.safetensors": b"", "b.safetensors": b"", "config.json": json.dumps(CONFIG).encode()}, "2 safetensors files"),
    ({"model.safetensors": b"", "config.json": b'{"architectures": ["x"], "eos_token_id": "2"}'}, "truncated|eos"),
])
def test_a_folder_that_is_no_checkpoint_says_why(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("config, generation, ids", [
    (2, [1, 106], (2, 1, 106)), ([5, 6], 6, (5, 6)), (None, None, ()), (None, 7, (7,)),
])
def test_stop_ids_are_the_union_of_both_configs(tmp_path, config, generation, ids):
    p = folder(tmp_path, {"model.safetensors": {"x": torch.ones(1)}}, eos_token_id=config)
    (p / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_checkpoint(p).eos_ids == ids


@pytest.mark.parametrize("bad", ["2", -1, True, [1, None], {"a": 1}, 1 << 40])
def test_wrong_stop_ids_are_refused(tmp_path, bad):
    p = folder(tmp_path, {"model.safetensors": {"x": torch.ones(1)}}, eos_token_id=bad)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        open_checkpoint(p)


def test_code_of_the_checkpoint_is_ignored_with_a_notice(tmp_path):
    p = folder(tmp_path, {"model.safetensors": {"x": torch.ones(1)}}, auto_map={"AutoModel": "evil.Model"})
    (p / "evil.py").write_text("raise SystemExit('ran')")
    assert "auto_map" in open_checkpoint(p).notices[0]


def test_templates_come_from_all_places_and_a_file_of_its_own_wins(tmp_path):
    p = folder(tmp_path, {"model.safetensors": {"x": torch.ones(1)}})
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "t"}]
    (p / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed, "bos_token": {"content": "<s>"}}))
    c = open_checkpoint(p)
    assert c.chat_templates == {"default": "a", "tool_use": "t"} and c.special_tokens == {"bos_token": "<s>"}
    (p / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert open_checkpoint(p).chat_templates["default"] == "j"
    (p / "chat_template.jinja").write_text("f")
    assert open_checkpoint(p).chat_templates == {"default": "f", "tool_use": "t"}
    for bad in ("3", '[{"name": [], "template": "x"}]', '["x"]', '[{"name": "default"}]'):
        (p / "chat_template.jinja").unlink(missing_ok=True)
        (p / "chat_template.json").unlink(missing_ok=True)
        (p / "tokenizer_config.json").write_text('{"chat_template": ' + bad + "}")
        with pytest.raises(CheckpointError, match="template"):
            open_checkpoint(p)


def test_random_damage_to_a_header_never_gives_a_traceback(tmp_path):
    """200 mutations of a valid file: each is read or refused with a CheckpointError."""
    save_file(some_tensors(), tmp_path / "model.safetensors")
    good = (tmp_path / "model.safetensors").read_bytes()
    n = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + n])
    rng = random.Random(0)
    hostile = [None, -1, 1 << 63, 1 << 200, 1.5, "x", [], {}, True, [[]], [1 << 62, 1 << 62], [-1, 4], "BF16", "I4"]
    refused = 0
    for i in range(200):
        if i % 2:
            raw = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                raw[rng.randrange(8 + n)] = rng.randrange(256)
            raw = bytes(raw[: rng.choice([len(raw), len(raw), rng.randrange(len(raw))])])
        else:
            changed = json.loads(json.dumps(header))
            entry = changed[rng.choice(sorted(changed))]
            entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(hostile)
            text = json.dumps(changed).encode()
            raw = len(text).to_bytes(8, "little") + text + good[8 + n :]
        (tmp_path / "model.safetensors").write_bytes(raw)
        try:
            store = open_folder(tmp_path)
            for name in store.tensors:
                tensors.read(store, name)
        except CheckpointError:
            refused += 1
    assert refused > 100
