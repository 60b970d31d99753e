"""What a process does first, so that it starts fast.

Images of containers set PYTHONDONTWRITEBYTECODE, and folders of packages may be read-only. If
torch was installed without compiled files, too, every process compiles it and Transformers again,
which takes longer than the rest of a short replay. A private folder of the user has them then.
"""

import gc
import os
import resource
import signal
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from areal_core.safety.private import ForeignOwner, default_root, make_private

PREFIX, NEVER_WRITE = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def cache_bytecode() -> None:
    """Let this process and those that it starts keep compiled files, if torch has none."""
    variables = bytecode_variables()
    os.environ.update(variables)
    if variables:
        sys.pycache_prefix, sys.dont_write_bytecode = variables[PREFIX], False


def bytecode_variables() -> dict[str, str]:
    """Return the variables of a Python that keeps compiled files in a folder of this user.

    Empty if torch has compiled files, if Python can write them, or if PYTHONPYCACHEPREFIX is set.
    """
    try:
        torch = find_spec("torch")
    except ImportError:
        return {}
    if PREFIX in os.environ or torch is None or torch.origin is None:
        return {}
    if Path(cache_from_source(torch.origin)).exists():
        return {}
    if not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK):
        return {}
    root = Path(default_root())
    folder = root / "bytecode"
    try:
        make_private(root)
        make_private(folder)
    except (ForeignOwner, OSError):  # slower, and nothing else
        return {}
    return {PREFIX: str(folder), NEVER_WRITE: ""}


def say_when_time_is_up() -> None:
    """End with a sentence a second before the CPU time that this shell allows (`ulimit -t`)."""
    allowed_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if allowed_s == resource.RLIM_INFINITY:
        return

    def end(number: int, frame: object) -> None:
        print(f"Error: this shell allows {allowed_s} s of CPU time: raise `ulimit -t`", file=sys.stderr)
        raise SystemExit(2)

    signal.signal(signal.SIGXCPU, end)
    resource.setrlimit(resource.RLIMIT_CPU, (max(allowed_s - 1, 1), allowed_s))


def collect_garbage_rarely() -> None:
    """Let imports run without a garbage collection every 700 objects.

    The objects of torch and Transformers stay; looking through them again and again takes a tenth
    of the CPU time in which a process starts.
    """
    gc.set_threshold(100_000)
