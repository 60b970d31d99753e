"""Child processes that end when we do: started in sessions of their own, ended with every descendant."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import BinaryIO

import psutil

_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment that keeps numeric libraries to `num_threads`, so that processes do not fight for the cores."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {name: str(num_threads) for name in names}


def start(command: list[str], env: Mapping[str, str], output: int | BinaryIO) -> subprocess.Popen[bytes]:
    """Starts a command in its own session with our environment changed by `env`; both its streams go to `output`.

    On Linux it gets SIGTERM when the thread that started it ends, so that not even SIGKILL to us leaves it behind.
    """
    return subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_tree(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """Ends a process and all its descendants: SIGTERM, then SIGKILL after `grace_s`. Fine when it has ended already."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in running_in_session(process.pid):
            send(member, number)
        deadline = time.monotonic() + grace_s
        while running_in_session(process.pid) and time.monotonic() < deadline:
            process.poll()  # takes the exit code as soon as there is one
            time.sleep(0.05)
    process.wait()


def running_in_session(session_id: int) -> list[psutil.Process]:
    """The session's processes, also those whose parent has died and so are no longer anyone's children."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (OSError, psutil.NoSuchProcess):  # ended between the listing and the question
            continue
    return members


def send(process: psutil.Process, number: int) -> None:
    """Sends a signal, to a process that may have ended."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
