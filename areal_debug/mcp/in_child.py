"""The child that answers one call: waits for it, gives up its rights, and runs the verb."""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
from typing import Any

import areal_debug.render
import recorder.confine
from areal_debug.cli import main
from areal_debug.start_up import cache_bytecode
from areal_debug.waiting import PROGRESS_FILE, PROGRESS_VARIABLE
from recorder.landlock import PR_SET_PDEATHSIG, restrict

READY = (areal_debug.render, recorder.confine)  # imported before the call arrives, for its speed


def libraries() -> list[str]:
    """Return what Python needs to read; /proc as a verb looks at the memory of its own child."""
    compiled = [sys.pycache_prefix] if sys.pycache_prefix else []
    return [*recorder.confine.SYSTEM_PATHS, "/proc", *recorder.confine.python_paths(), *compiled]


def run(request: dict[str, Any]) -> None:
    """Run the verb of a request as its command line would; does not return."""
    scratch = request["scratch"]
    os.environ |= {PROGRESS_VARIABLE: os.path.join(scratch, PROGRESS_FILE), "TMPDIR": scratch}
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model is a folder below a root
    tempfile.tempdir = None
    for name in request["imports"]:
        with contextlib.suppress(ImportError):  # the verb says what to install
            importlib.import_module(name)
    if request["confined"]:
        restrict([*request["roots"], *libraries()], (scratch, os.devnull), network=False)
    main.main(args=request["argv"], prog_name="areal-debug")


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    cache_bytecode()
    if line := sys.stdin.readline():
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        run(json.loads(line))
