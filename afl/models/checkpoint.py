"""One view of a checkpoint, whatever its format: config, tensors, tokenizer, templates, stop ids.

Everything is in Hugging Face terms: a GGUF file's metadata is converted to the forms of config.json and
tokenizer.json, so nothing after `open_checkpoint` knows formats.  Nothing of a checkpoint is ever executed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from afl.errors import CheckpointError
from afl.models import gguf_text, tensors
from afl.models.gguf import read_file
from afl.models.gguf_model import convert
from afl.models.json_file import is_count, read_bytes, read_json
from afl.models.safetensors import open_folder
from afl.models.tensors import TensorInfo, TensorStore

MAX_TEMPLATE = 1 << 20
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_PICKLE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@attrs.frozen(eq=False, repr=False)
class Checkpoint:
    """What a checkpoint holds.  Only headers and small files have been read.

    `eos_ids` is the union of config and generation config; the tokenizer adds its own (`run.text.Tokenizer`).
    `tokenizer_json` makes the text of a tokenizer.json on demand; None when there is no tokenizer.
    """

    path: Path
    config: dict[str, Any]
    store: TensorStore
    generation_config: dict[str, Any]
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, str]              # "bos_token" -> its text, ...
    chat_templates: dict[str, str]              # name -> jinja source; "default" is the usual one
    tokenizer_json: Callable[[], str | bytes] | None
    notices: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensor name -> shape, dtype and file."""
        return self.store.tensors

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of one tensor; do not write to the result."""
        return self.store.rows(name, start, stop)

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor in the dtype that the checkpoint gives."""
        return tensors.read(self.store, name)

    def read_into(self, name: str, dtype: torch.dtype, put: Callable[[torch.Tensor, int], object]) -> None:
        """Hand one tensor to `put(rows, first row)`, in chunks of rows; `dtype` is what it will be stored in."""
        tensors.read_into(self.store, name, dtype, put)

    def raw_into(self, name: str, put: Callable[[torch.Tensor, int], object]) -> None:
        """Hand the rows of one tensor as the file holds them, uint8 [n, row bytes], to `put(rows, first row)`."""
        for start, stop in tensors.chunks(self.tensors[name].shape):
            put(self.store.raw_rows(name, start, stop), start)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        arch = ", ".join(self.config["architectures"])
        return f"Checkpoint({arch}, {len(self.tensors)} tensors, {self.path})"


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a Hugging Face folder with safetensors, a GGUF file, or a folder with a single GGUF file.

    Raises CheckpointError with one clear message on anything missing, corrupt or unknown.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path)
        raise CheckpointError(f"{path} is not a checkpoint: expected a .gguf file or a folder with safetensors")
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return _open_folder(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    if ggufs:
        names = ", ".join(f.name for f in ggufs[:8])
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files: {names}; name the one to open")
    pickles = sorted(f.name for kind in _PICKLE for f in path.glob(kind))
    if pickles:
        raise CheckpointError(
            f"{path} holds pickled weights only ({', '.join(pickles[:5])}), which can run code when opened and are "
            "never read; convert them to safetensors (transformers: model.save_pretrained)"
        )
    raise CheckpointError(f"{path} holds no weights: expected *.safetensors or *.gguf")


def _open_gguf(path: Path) -> Checkpoint:
    file = read_file(path)
    config, store = convert(file)
    stops = gguf_text.stop_ids(file)
    return Checkpoint(
        path=path,
        config=config,
        store=store,
        generation_config={"eos_token_id": list(stops)} if stops else {},
        eos_ids=stops,
        special_tokens=gguf_text.special_tokens(file),
        chat_templates=_checked_templates(gguf_text.chat_templates(file), path),
        tokenizer_json=lambda: gguf_text.tokenizer_json(file),
    )


def _open_folder(folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise CheckpointError(f"{folder}/config.json names no architecture: 'architectures' must be a list of names")
    generation = _optional(folder / "generation_config.json")
    text = _optional(folder / "tokenizer_config.json")
    notices = [
        f"{name} asks for its own code (auto_map), which is never run; the built-in {names[0]} is used"
        for name, part in (("config.json", config), ("tokenizer_config.json", text)) if part.get("auto_map")
    ]
    store = open_folder(folder)
    tokenizer = folder / "tokenizer.json"
    ids = [*_ids(config, "config.json"), *_ids(generation, "generation_config.json")]
    return Checkpoint(
        path=folder,
        config=config,
        store=store,
        generation_config=generation,
        eos_ids=tuple(dict.fromkeys(ids)),
        special_tokens=_special_tokens(folder, text),
        chat_templates=_checked_templates(_templates(folder, text), folder),
        tokenizer_json=(lambda: read_bytes(tokenizer)) if tokenizer.exists() else None,
        notices=(*notices, *store.notices),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _ids(part: Mapping[str, Any], where: str) -> list[int]:
    """`eos_token_id` as a list; it may be absent, null, a number or a list."""
    found = part.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(is_count(i) and i < 1 << 31 for i in ids):
        raise CheckpointError(f"{where}: eos_token_id is {str(found)[:80]}; expected a token id or a list of them")
    return ids


def _special_tokens(folder: Path, text: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens; tokenizer_config.json wins over special_tokens_map.json."""
    merged = _optional(folder / "special_tokens_map.json") | {k: v for k, v in text.items() if v is not None}
    found = {}
    for kind in SPECIAL:
        value = merged.get(kind)
        value = value.get("content") if isinstance(value, dict) else value  # an AddedToken spelled out
        if isinstance(value, str):
            found[kind] = value
    return found


def _templates(folder: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    """Chat templates from all places; a file of its own wins over one inside another file."""
    inside = text.get("chat_template")
    named = inside if isinstance(inside, list) else [] if inside is None else [{"name": "default", "template": inside}]
    found: dict[str, Any] = {}
    for t in named:
        if not isinstance(t, dict) or not isinstance(t.get("name"), str):
            raise CheckpointError(f"{folder}/tokenizer_config.json: chat_template must list {{name, template}} objects")
        found[t["name"]] = t.get("template")
    legacy = _optional(folder / "chat_template.json").get("chat_template")
    if legacy is not None:
        found["default"] = legacy
    files = {"default": folder / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.exists():
            found[name] = read_bytes(file, MAX_TEMPLATE).decode("utf-8", "replace")
    return found


def _checked_templates(found: Mapping[str, Any], where: Path) -> dict[str, str]:
    for name, source in found.items():
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE:
            raise CheckpointError(f"{where}: chat template {name[:80]!r} must be a text of at most {MAX_TEMPLATE}")
    return dict(found)
