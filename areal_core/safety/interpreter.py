"""The one way to start Python: without the current folder on its path.

`python -m` and `python -c` import from the current folder before anything else. That may be a
folder that somebody sent, with a `transformers.py` in it. A file has its own folder on the path,
as Python does: a user's script may import what is beside it.
"""

import sys
from collections.abc import Sequence

SAFE = "-P"  # no folder of the program on the path


def python_command(*program: str, python: Sequence[str] = (), file_is_ours: bool = False) -> list[str]:
    """Return the command that runs `-m MODULE ARGUMENT...`, `-c TEXT ...` or `FILE ...`.

    Args:
        python: a command of the user's that runs Python; by default this interpreter.
        file_is_ours: the file imports nothing that is beside it.
    """
    is_safe = file_is_ours or program[0] in ("-m", "-c")
    return [*(python or (sys.executable,)), *([SAFE] if is_safe else []), *program]
