"""Ranks forked from one interpreter with torch imported: a rank starts in milliseconds.

    stdin: {"program", "environment", "log"} a line  ──fork──>  the rank runs the program as __main__
    stdout: its pid a line

From outside, a rank is an ordinary one: its variables are written into the block of
/proc/PID/environ too (so their values must be as long as those that this process was started
with), and its stdin stays open and silent.
"""

import ctypes
import json
import os
import runpy
import signal
import sys

import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.utils.data  # noqa: F401

libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_void_p


def become(program: str, environment: dict[str, str], log: str) -> None:
    """Turn this fork into the rank that the request describes, and run it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for name, value in environment.items():
        place = libc.getenv(name.encode())
        assert len(value) == len(os.environ[name]), f"{name}={value} does not fit over {os.environ[name]}"
        ctypes.memmove(place, value.encode(), len(value))
        os.environ[name] = value
    silence, _kept_open = os.pipe()
    os.dup2(silence, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [program]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    """Fork a rank for every request, until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a killed rank is gone, not a zombie
    requests = os.fdopen(os.dup(0))
    for request in iter(requests.readline, ""):
        pid = os.fork()
        if pid == 0:
            become(**json.loads(request))
            return
        print(pid, flush=True)


if __name__ == "__main__":
    main()
