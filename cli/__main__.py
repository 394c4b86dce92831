"""`python -m afl_cli` is `afl`."""

from .main import main

main()
