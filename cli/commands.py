"""The commands of `afl` and how they end: 0 done, 1 failed, 2 bad input, 130 Ctrl-C, 141 reader gone.  No traceback."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from afl.config import unknown_variables
from afl.errors import AflError

from . import check, chips, doctor, eplb, eval, inspect, replay, run
from .terminal import say

HELP = """Large language models on CPUs and Ascend NPUs.

\b
  afl run "What is the capital of France?"       answer one prompt with the default model
  afl run --model ./my-checkpoint --stats Hello  a Hugging Face folder or a .gguf file, with figures
  afl run --file prompts.txt --json > out.jsonl  many prompts as one batch
  afl check --chip a3 --tp 2                     whether a model fits a chip, and what it takes, without one
  afl inspect graph --rows 2                     the program that one step of a model is
  afl eplb plan --load load.npz --ranks 32       where to put experts, from a recorded load
  afl eval ppl --text book.txt --weights int8    what a precision costs in quality
  afl chips                                      what it runs on
  afl doctor                                     what is installed, what is missing, and what that means
"""


class Grouped(TyperCommand):
    """A command whose help lists options under the headings of their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for p in self.get_params(ctx):
            record = p.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(p, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Commands(TyperGroup):
    """A group that turns errors into messages and exit statuses."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AflError as e:
            _fail(ctx, e, str(e), e.exit_status)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            say("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # whoever read our output has enough; closing stdout must not fail a second time
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(141) from None
        except MemoryError as e:
            _fail(ctx, e, "the host has not enough memory; choose a smaller model, --max-seqs or --kv-blocks", 1)
        except OSError as e:
            _fail(ctx, e, f"{e.strerror or e}" + (f": {e.filename}" if e.filename else ""), 2)
        except (typer.Exit, typer.Abort, SystemExit):
            raise
        except Exception as e:
            if hasattr(e, "show"):  # usage errors show themselves
                raise
            _fail(ctx, e, f"internal error, please report it: {type(e).__name__}: {e}\n"
                          f"at {_where(e)}; `afl --debug ...` prints the whole traceback", 1)


def _fail(ctx: Any, error: Exception, message: str, status: int) -> None:
    if ctx.params.get("debug"):
        raise error
    say(message, "error")
    raise typer.Exit(status) from None


def _where(e: BaseException) -> str:
    t = e.__traceback__
    while t is not None and t.tb_next is not None:
        t = t.tb_next
    return f"{Path(t.tb_frame.f_code.co_filename).name}:{t.tb_lineno}" if t is not None else "an unknown line"


app = typer.Typer(
    cls=Commands, help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"afl {version('afl')}")
        raise typer.Exit


@app.callback()
def start(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    show_version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    for row in unknown_variables():
        say(row, "warning")


def _command(group: typer.Typer, name: str, function: Any) -> None:
    group.command(name, cls=Grouped)(function)


_command(app, "run", run.run)
_command(app, "check", check.check)
_command(app, "replay", replay.replay)
look = typer.Typer(help=inspect.HELP, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(look, name="inspect")
for _name, _function in inspect.COMMANDS.items():
    _command(look, _name, _function)
balance = typer.Typer(help=eplb.HELP, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(balance, name="eplb")
for _name, _function in eplb.COMMANDS.items():
    _command(balance, _name, _function)
measure = typer.Typer(help=eval.HELP, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(measure, name="eval")
for _name, _function in eval.COMMANDS.items():
    _command(measure, _name, _function)
_command(app, "doctor", doctor.doctor)
_command(app, "chips", chips.show_chips)
_command(app, "models", chips.show_models)
