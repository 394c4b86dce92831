"""`python -m afl_cli` is `afl`."""

from afl_cli.main import main

main()
