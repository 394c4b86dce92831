"""`afl chips` and `afl models`: what this installation can run on, and what it can run."""

import json as jsons
from typing import Annotated, Any

import attrs
import typer

from afl.config import environment
from afl.errors import ConfigError, unknown
from afl.models.locate import ALIASES, cached_models, hub_folder

from .chip_page import columns, figures, page, sources
from .early import find_chip
from .run import Json
from .terminal import write


def show_chips(
    name: Annotated[str | None, typer.Argument(
        metavar="NAME", help="Show one chip in full.", show_default=False)] = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option(
        "--markdown", help="The page docs/chips.md: all chips, their figures, and the kernels of every op.")] = False,
) -> None:
    """List the chips, or show one: features, dtypes, limits, layouts, and the figures of each bin with their sources.

    \b
    Examples:
      afl chips
      afl chips 310p
      afl chips --json
      afl chips --markdown > docs/chips.md
    """
    from afl import chip as chips

    if markdown:
        if name is not None or json:
            raise ConfigError("--markdown is one page about all chips; leave NAME and --json out")
        from afl import plugins
        from afl.ir import op as ops

        plugins.load_ops()
        write(page(list(chips.registered().values()), ops.registered().values()))
        return

    if name is not None and find_chip(name) is None:
        raise ConfigError(unknown("chip", name, chips.names()))
    found = [chip for n in ([name] if name is not None else chips.names()) if (chip := find_chip(n)) is not None]
    if name is None:
        from importlib.metadata import entry_points

        if entry_points(group="afl.plugins"):       # chips of plugins are known once those are imported
            from afl import plugins

            plugins.load_ops()
            found = list(chips.registered().values())
    if json:
        write(jsons.dumps([_record(c) for c in found] if name is None else _record(found[0])) + "\n")
    elif name is None:
        width = max(len(c.name) for c in found)
        for c in found:
            write(f"{c.name:<{width}}  {', '.join(c.dtypes):<30}  {c.note}\n")
    else:
        for key, value in _record(found[0]).items():
            if key != "rooflines":
                write(f"{key:<18} {_text(value)}\n")
        if found[0].roofline.bin:
            write("\n" + columns(figures(found[0])) + "\n")
            write(columns([(f"source of {k}", v) for k, v in sources(found[0]).items()]))


def _record(c: Any) -> dict[str, Any]:
    row = {f.name: getattr(c, f.name) for f in attrs.fields(type(c))}
    plain = {
        **row, "features": sorted(c.features), "limits": attrs.asdict(c.limits),
        "rooflines": [attrs.asdict(r) for r in c.rooflines],
        "layouts": dict(c.layouts), "prefer": {k: list(v) for k, v in c.prefer.items()}, "captures": c.captures,
    }
    return plain


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={_text(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_text, value)) + ")" if value else "none"
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else "none"


def show_models(json: Json = False) -> None:
    """List the architectures that can be loaded, the aliases, and the models in the local Hugging Face cache.

    \b
    Examples:
      afl models
      afl run --model smollm2 "Hello"
    """
    from afl import plugins
    from afl.models.spec import registered

    plugins.load_models()
    hub = hub_folder(environment())
    found = {
        "architectures": list(registered()), "aliases": {k: a.install for k, a in ALIASES.items()},
        "cached": cached_models(hub), "cache": str(hub),
    }
    if json:
        write(jsons.dumps(found) + "\n")
        return
    write("architectures (config.json's \"architectures\"):\n" + "".join(f"  {n}\n" for n in found["architectures"]))
    write("aliases:\n" + "".join(f"  {k:<12} {v}\n" for k, v in found["aliases"].items()))
    write(f"in the local cache {hub}:\n" + ("".join(f"  {n}\n" for n in found["cached"]) or "  none\n"))
