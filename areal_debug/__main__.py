"""`python -m areal_debug`, the same as `areal-debug`."""

from areal_debug.cli import main

main(prog_name="areal-debug")
