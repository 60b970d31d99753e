"""Run a command, then end what it leaves running: `python -m areal_core.launch.task COMMAND...`.

srun waits for every process that has the output of a task open. One remaining reward worker would
keep the step, and so the run, alive.
"""

import sys

from areal_core.launch.processes import end_tree, start
from areal_core.launch.torchrun import ended_on_signals, shell_code


def main(command: list[str]) -> int:
    """Return the command's exit code, as a shell would show it."""
    with ended_on_signals():
        child = start(command, {}, sys.stdout.fileno())
        try:
            return shell_code(child.wait())
        finally:
            end_tree(child)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
