"""`afl doctor`: what is installed, what is missing, and what that means."""

import json as jsons

import typer

from afl import chip as chips

from .early import find_chip
from .run import Json
from .terminal import busy, write


def doctor(json: Json = False) -> None:
    """Look at this machine: versions, vendor libraries, devices; say in plain words what is wrong and what to do.

    Works when torch cannot be imported: whatever may fail is tried in processes of their own. Status: 0 all is well,
    1 something is to be put right.

    \b
    Examples:
      afl doctor
      afl doctor --json
    """
    with busy("looking at this machine"):
        from afl.run.doctor import diagnose
        from afl.run.machine import look

        known = [c for name in chips.names() if (c := find_chip(name)) is not None]
        socs = {soc: c.name for c in known for soc in c.soc}
        found = diagnose(look(), socs)
    write(jsons.dumps(found.record()) + "\n" if json else str(found))
    if not found.healthy:
        raise typer.Exit(1)
