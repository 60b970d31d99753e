"""Runs a command to its end, then ends what it has left behind on this machine: `python -m areal_core.launch.task COMMAND...`.

srun waits for everybody who still holds the output of a task. One forgotten reward worker would keep the step, and so the run, alive.
"""

import sys

from areal_core.launch.processes import end_tree, start
from areal_core.launch.torchrun import ended_on_signals, shell_code


def main(command: list[str]) -> int:
    """The command's exit code, as a shell would show it."""
    with ended_on_signals():
        child = start(command, {}, sys.stdout.fileno())
        try:
            return shell_code(child.wait())
        finally:
            end_tree(child)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
