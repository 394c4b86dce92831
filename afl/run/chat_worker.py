"""The process that renders chat templates: reads a JSON line, answers with a JSON line.  Run by `afl.run.chat`.

A template is a program from an untrusted file.  Jinja's sandbox keeps it from Python's internals but not from
looping for ever or building huge strings, so it runs here, with limits that the operating system enforces: memory,
no new files, no new processes, and a timer that ends this process even if its parent is gone.
Imports nothing of afl, so that starting it is quick.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any


def main(limits: dict[str, Any]) -> None:
    """Serve until stdin ends.  `limits`: memory bytes, output characters, seconds, and where to import from."""
    sys.path[:] = limits["path"]
    compile_template = lru_cache(maxsize=8)(_environment().from_string)
    for kind, most in ((resource.RLIMIT_AS, limits["memory"]), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0)):
        resource.setrlimit(kind, (most, most))
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, limits["seconds"] + 1)     # default action: the process ends
        answer = _answer(compile_template, line, limits["output"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


class Refused(Exception):
    """The template called raise_exception: these messages are not what it expects."""


def _answer(compile_template: Any, line: str, most: int) -> str:
    try:
        return json.dumps({"text": _render(compile_template, json.loads(line), most)})
    except Refused as e:
        return json.dumps({"refused": str(e)[:500]})
    except MemoryError:
        return json.dumps({"error": "it needs too much memory"})
    except RecursionError:
        return json.dumps({"error": "it is nested too deeply"})
    except Exception as e:  # whatever a template provokes is its own fault
        return json.dumps({"error": f"{type(e).__name__}: {str(e)[:500]}"})


def _render(compile_template: Any, job: dict[str, Any], most: int) -> str:
    now = datetime.fromisoformat(job["now"])
    pieces, size = [], 0
    for piece in compile_template(job["template"]).generate(job["variables"], strftime_now=now.strftime):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise ValueError(f"its output is longer than {most} characters")
    return "".join(pieces)


def _environment() -> Any:
    """The dialect that chat templates are written in: blocks swallow their line, tojson keeps HTML characters."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the answer in training templates; here its body is rendered as it is."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: Any) -> None:
        raise Refused(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.globals.pop("lipsum")
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    for warm in ("{% for a in [{'b': 1}] %}{{ a | tojson }}{% endfor %}", "{{ nothing.at.all }}", "{% if %}",
                 "{{ 'a' | wordwrap(1) }}{{ 1 | pprint }}"):
        try:    # errors import what describes them, which the limit on open files would forbid later
            env.from_string(warm).render()
        except jinja2.TemplateError:
            pass
    return env


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
