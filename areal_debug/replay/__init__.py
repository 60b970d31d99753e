"""`areal-debug replay`: start the ranks of a replay, run a task on each, print the result."""

from areal_debug.installation import names_of

__getattr__ = names_of("replayer", __name__)
