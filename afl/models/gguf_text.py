"""The text side of a GGUF file in Hugging Face terms: tokenizer.json, special tokens, chat templates, stop ids.

A wrong pre-tokeniser gives plausible but wrong ids, so names that are not in `PRE_TOKENIZERS` are refused.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from afl.errors import CheckpointError, unknown
from afl.models.gguf import GgufFile

# token_type values of the format
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _BYTES | {"use_regex": False}]


_WORDS = (  # the pattern of Llama 3; Qwen differs in the number of digits per token only
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = [_BYTES | {"use_regex": True}]
PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    # name: pre-tokenisers; whether a word that is a token skips its merges; unicode normal form
    "gpt-2": {"pre": _GPT2, "ignore_merges": False, "form": None},
    "smollm": {"pre": [{"type": "Digits", "individual_digits": True}, *_GPT2], "ignore_merges": False, "form": None},
    "llama-bpe": {"pre": _split(_WORDS % "{1,3}"), "ignore_merges": True, "form": None},
    "qwen2": {"pre": _split(_WORDS % ""), "ignore_merges": False, "form": "NFC"},
}
MODELS = ("gpt2",)


def tokenizer_json(file: GgufFile) -> str:
    """The text of a tokenizer.json that encodes as the metadata says."""
    meta = file.meta
    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if model not in MODELS:
        _fail(file, unknown("tokenizer.ggml.model", str(model)[:80], MODELS))
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        _fail(file, unknown("tokenizer.ggml.pre", str(pre)[:80], PRE_TOKENIZERS))
    how = PRE_TOKENIZERS[pre]
    tokens, types, merges = _vocabulary(file)
    special = {_NORMAL: None, _UNUSED: None, _BYTE: None, _UNKNOWN: True, _CONTROL: True, _USER: False}
    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": special[t]}
        for i, t in enumerate(types) if special[t] is not None
    ]
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": how["form"]} if how["form"] else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": how["pre"]},
        "post_processor": _post_processor(file, tokens),
        "decoder": _BYTES | {"use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": how["ignore_merges"], "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges,
        },
    }, ensure_ascii=False)


def special_tokens(file: GgufFile) -> dict[str, str]:
    """{"bos_token": text, "eos_token": text, ...} of the ids that the metadata gives."""
    tokens = file.meta.get("tokenizer.ggml.tokens")
    found = {}
    for kind, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        i = _token_id(file, f"{kind}_token_id")
        if i is not None and isinstance(tokens, list):
            found[f"{name}_token"] = tokens[i]
    return found


def stop_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids that end an answer: end of text, of turn, of message, as far as the metadata names them."""
    found = (_token_id(file, f"{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in found if i is not None))


def chat_templates(file: GgufFile) -> dict[str, str]:
    """Template texts by name; the unnamed one is "default"."""
    at = "tokenizer.chat_template"
    found = {k[len(at) + 1 :]: v for k, v in file.meta.items() if k.startswith(at + ".")}
    if at in file.meta:
        found["default"] = file.meta[at]
    if not all(isinstance(t, str) for t in found.values()):
        _fail(file, f"{at} must be a string")
    return found


def _vocabulary(file: GgufFile) -> tuple[list[str], list[int], list[list[str]]]:
    tokens, merges = file.meta.get("tokenizer.ggml.tokens"), file.meta.get("tokenizer.ggml.merges")
    types = file.meta.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(merges, list) or not tokens:
        _fail(file, "tokenizer.ggml.tokens and tokenizer.ggml.merges must be arrays of strings")
    if not isinstance(types, np.ndarray) or len(types) != len(tokens) or not np.isin(types, range(1, 7)).all():
        _fail(file, f"tokenizer.ggml.token_type must give a type 1..6 for each of the {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        _fail(file, "tokenizer.ggml.tokens has duplicates")
    known, pairs = set(tokens), []
    for m in merges:
        left, _, right = m.partition(" ")
        if left not in known or right not in known or left + right not in known:
            _fail(file, f"tokenizer.ggml.merges has {m[:80]!r}, which does not join two tokens to a third")
        pairs.append([left, right])
    return tokens, types.tolist(), pairs


def _post_processor(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Adds the begin and end tokens that `add_bos_token` and `add_eos_token` ask for."""
    bytes_ = _BYTES | {"trim_offsets": False, "use_regex": True}
    # the format's runtime adds a begin token for this pre-tokeniser unless the file says otherwise
    defaults = {"bos": file.meta.get("tokenizer.ggml.pre") == "llama-bpe", "eos": False}
    ids = {}
    for kind, default in defaults.items():
        wanted = file.meta.get(f"tokenizer.ggml.add_{kind}_token", default)
        if not isinstance(wanted, bool):
            _fail(file, f"tokenizer.ggml.add_{kind}_token must be true or false")
        if wanted:
            ids[kind] = _token_id(file, f"{kind}_token_id")
            if ids[kind] is None:
                _fail(file, f"tokenizer.ggml.add_{kind}_token is set, but there is no {kind}_token_id")
    if not ids:
        return bytes_
    mark = {kind: [{"SpecialToken": {"id": tokens[i], "type_id": 0}}] for kind, i in ids.items()}
    single = [*mark.get("bos", []), {"Sequence": {"id": "A", "type_id": 0}}, *mark.get("eos", [])]
    second = [*mark.get("bos", []), {"Sequence": {"id": "B", "type_id": 1}}, *mark.get("eos", [])]
    special = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ids.values()}
    template = {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": special}
    return {"type": "Sequence", "processors": [bytes_, template]}


def _token_id(file: GgufFile, key: str) -> int | None:
    i, tokens = file.meta.get(f"tokenizer.ggml.{key}"), file.meta.get("tokenizer.ggml.tokens")
    if i is None:
        return None
    if type(i) is not int or not 0 <= i < (len(tokens) if isinstance(tokens, list) else 1 << 31):
        _fail(file, f"tokenizer.ggml.{key} is {str(i)[:40]}, which is no token")
    return i


def _fail(file: GgufFile, what: str) -> NoReturn:
    raise CheckpointError(f"{file.path.name}: {what[:600]}")
