"""Parameters from a checkpoint: planned on metadata alone, checked whole, then read straight into place.

`plan_load` compares the parameter specs with the tensors there are and reports every violation in one error;
`load_params` executes the plan.  Each source is converted chunk by chunk into its slice of the destination, so peak
memory is the parameters plus one chunk.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from afl import tree
from afl.errors import CheckpointError, violations
from afl.layout import ND
from afl.models.checkpoint import Checkpoint
from afl.models.spec import ParamSpec
from afl.models.tensors import TensorInfo, same
from afl.ops.quant.scheme import Store
from afl.types import DTYPES

LayoutOf = Callable[[str], Any]     # role of a parameter -> its Layout, or the Store of a scheme
Progress = Callable[[int, int], None]                                   # (bytes done, bytes in all)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED = {  # tensors that any model may leave unused
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)": "computed from the config",
    r".*\.attn\.(masked_)?bias": "a constant mask",
    r"lm_head\.weight": "an equal copy of the embedding, which is shared",  # `tied_head` has compared them
}
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_MOST = 20  # violations spelled out


@attrs.frozen
class Piece:
    """One checkpoint tensor and the slice of one parameter that it fills."""

    param: str
    source: str
    cat: int
    start: int
    size: int | None        # None: the whole parameter


@attrs.frozen
class LoadPlan:
    """What to read, in order, and what is left out and why."""

    pieces: tuple[Piece, ...]
    ignored: Mapping[str, str]


@attrs.frozen
class LoadReport:
    """What a load did: parameter bytes, tensors read, tensors left out with the reason, notices for the user."""

    param_bytes: int
    tensors: int
    ignored: Mapping[str, str]
    notices: tuple[str, ...] = ()


def plan_load(spec_tree: Any, tensors: Mapping[str, TensorInfo], ignore: Mapping[str, str] | None = None) -> LoadPlan:
    """Assign checkpoint tensors to parameters.  Pure; `ignore` maps regular expressions of names to reasons.

    A tensor that nobody uses is an error when it lies inside a layer or module that the model computes, because it
    would change the result there; elsewhere it is left out and reported.  Raises CheckpointError with every violation.
    """
    pieces, wrong = [], []
    for path, spec in tree.paths(spec_tree):
        at = 0
        for i, source in enumerate(spec.source):
            shape = spec.part_shape(i)
            size = spec.parts[i] if spec.parts else None
            pieces.append(Piece(path, source, spec.cat, at, size))
            at += size or 0
            wrong += _mismatch(path, source, shape, tensors.get(source))
        assert not spec.parts or at == spec.shape[spec.cat], (path, spec)
    used = {p.source for p in pieces}
    rules = [(re.compile(k), why) for k, why in {**IGNORED, **(ignore or {})}.items()]
    owners = {owner for name in used for owner in _owners(name)}
    ignored = {}
    for name in tensors.keys() - used:
        why = next((why for rule, why in rules if rule.fullmatch(name)), None)
        if why is None and owners.isdisjoint(_ancestors(name)):
            why = "unknown to this model"
        if why is None:
            wrong.append(f"{name}: {tensors[name]} is not used by this model, and would change what its layer computes")
        else:
            ignored[name] = why
    if wrong:
        if len(wrong) > _MOST:
            wrong = [*wrong[:_MOST], f"... {len(wrong) - _MOST} more"]
        raise CheckpointError(violations("the checkpoint does not fit the model", wrong))
    return LoadPlan(tuple(pieces), dict(sorted(ignored.items())))


def load_params(
    spec_tree: Any,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    layout_of: LayoutOf = lambda role: ND,
    ignore: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> tuple[Any, LoadReport]:
    """The tree of parameters that `spec_tree` (leaves ParamSpec) describes, read from `checkpoint`.

    `dtype` is that of every parameter whose spec names none.  `layout_of` says how a role is stored.
    """
    plan = plan_load(spec_tree, checkpoint.tensors, ignore)
    specs = dict(tree.paths(spec_tree))
    total = sum(math.prod(s.shape) * _dtype(s, dtype).itemsize for s in specs.values())
    todo: dict[str, list[Piece]] = {}
    for piece in plan.pieces:
        todo.setdefault(piece.param, []).append(piece)
    params, done = [], 0
    for path, spec in specs.items():
        made, kind = layout_of(spec.role), _dtype(spec, dtype)
        dest = made.empty(spec.shape, kind)
        for p in todo[path]:
            _fill(checkpoint, made, dest, kind, p)
            done += math.prod(checkpoint.tensors[p.source].shape) * kind.itemsize
            if progress is not None:
                progress(done, total)
        params.append(dest)
    extra = [name for name, why in plan.ignored.items() if why == "unknown to this model"]
    notices = (f"{len(extra)} tensors of the checkpoint are not used: {_few(extra)}",) if extra else ()
    report = LoadReport(total, len({p.source for p in plan.pieces}), plan.ignored, notices)
    return tree.unflatten(tree.flatten(spec_tree)[1], params), report


def tied_head(
    config_tied: bool, checkpoint: Checkpoint, *, embed: str = EMBED, head: str = HEAD
) -> tuple[bool, str | None]:
    """Whether logits use the embedding, and a notice when the file and the config disagree.

    The file decides: a head of its own is used even if the config says tied (an equal copy is shared), and a missing
    one means tied.  Call it before the spec is built.
    """
    if head not in checkpoint.tensors:
        return True, None if config_tied else f"the checkpoint has no {head}; the embedding is used as output head"
    if not config_tied:
        return False, None
    if embed in checkpoint.tensors and same(checkpoint.store, embed, head):
        return True, None
    return False, f"the config ties output head and embedding, but {head} differs from {embed}; the file's head is used"


def _fill(checkpoint: Checkpoint, made: Any, dest: Any, dtype: torch.dtype, piece: Piece) -> None:
    """Write a piece into its slice of the parameter, chunk by chunk.

    A scheme that keeps the file's own numbers takes them as they are; see `afl/ops/quant/scheme.py`.
    """
    info = checkpoint.tensors[piece.source]
    dtype = getattr(dest, "dtype", dtype)       # what it is held in, which the values must fit
    if isinstance(made, Store) and info.stored in made.scheme.taken:
        checkpoint.raw_into(piece.source, lambda raw, row: made.put_taken(dest, info.stored, raw, piece.start + row))
    elif piece.cat == 0 or piece.size is None:
        checkpoint.read_into(piece.source, dtype, lambda rows, row: made.put(dest, rows, piece.start + row))
    else:
        assert getattr(made, "fmt", "") == "nd", f"{piece.param} is filled by columns, which {made.name!r} cannot"
        part = dest.narrow(piece.cat, piece.start, piece.size)
        checkpoint.read_into(piece.source, dtype, lambda rows, row: ND.put(part, rows, row))


def random_params(spec_tree: Any, seed: int, dtype: torch.dtype, layout_of: LayoutOf = lambda role: ND) -> Any:
    """Parameters without a checkpoint: normal ones scaled by 1/sqrt(last dimension), or what the spec's `init` says."""
    made = []
    rng = torch.Generator().manual_seed(seed)
    for spec in tree.leaves(spec_tree):
        if spec.init == "normal":
            x = torch.randn(spec.shape, generator=rng) * max(1, spec.shape[-1]) ** -0.5
        else:
            x = torch.full(spec.shape, {"ones": 1.0, "zeros": 0.0}[spec.init])
        made.append(layout_of(spec.role).to(x.to(_dtype(spec, dtype))))
    return tree.unflatten(tree.flatten(spec_tree)[1], made)


def _mismatch(path: str, source: str, shape: tuple[int, ...], found: TensorInfo | None) -> Iterable[str]:
    if found is None:
        yield f"{source}: not in the checkpoint; parameter {path} needs it with shape {list(shape)}"
    elif found.shape != shape:
        yield f"{source}: {found}, but parameter {path} needs shape {list(shape)}"
    elif found.dtype not in _FLOATS:
        yield f"{source}: {found}, but parameter {path} needs one of {', '.join(_FLOATS)}"


def _owners(name: str) -> list[str]:
    """The modules that a used tensor shows to be computed: its own, and those around it up to its layer.

    >>> _owners("model.layers.3.self_attn.q_proj.weight")
    ['model.layers.3.self_attn.q_proj', 'model.layers.3.self_attn', 'model.layers.3']
    """
    around = _ancestors(name)
    layers = [i for i, a in enumerate(around) if a.rpartition(".")[2].isdigit()]
    return around[: layers[0] + 1] if layers else around[:1]


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]


def _dtype(spec: ParamSpec, default: torch.dtype) -> torch.dtype:
    return default if spec.dtype is None else DTYPES[spec.dtype]


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names) - 5} more)" if len(names) > 5 else "")
