"""Entry point of `afl`.  Imports come after Ctrl-C is taken care of: even a very early one leaves no traceback."""

import os
import signal
import sys


def main() -> None:
    """Run the command line of this process and exit."""
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _reopen()
    try:
        from .commands import app
    except ImportError as e:
        sys.exit(f"afl: error: the command line cannot start: {e}; install afl together with what it requires")

    signal.signal(signal.SIGINT, before)
    status: object = 0
    try:
        app(prog_name="afl")
    except KeyboardInterrupt:
        status = 130
    except SystemExit as e:
        status = e.code
    if status == 130:
        # a second Ctrl-C during the interpreter's exit would print a traceback
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    sys.exit(status)  # type: ignore[arg-type]


def _reopen() -> None:
    """Start anew with /dev/null for the streams that were closed: a file opened later would take their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    os.execv(sys.executable, sys.orig_argv)
