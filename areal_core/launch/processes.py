"""Child processes that end when we do: started in sessions of their own, ended with every descendant."""

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import BinaryIO

import psutil


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment that keeps numeric libraries to `num_threads`, so that processes do not fight for the cores."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {name: str(num_threads) for name in names}


def start(command: list[str], env: Mapping[str, str], output: int | BinaryIO) -> subprocess.Popen[bytes]:
    """Starts a command in its own session with our environment changed by `env`; both its streams go to `output`."""
    return subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end_tree(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """Ends a process and all its descendants: SIGTERM, then SIGKILL after `grace_s`. Fine when it has ended already."""
    group = _members(process.pid)
    for member in group:
        _signal(member, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(group, timeout=grace_s)
    for member in stubborn:
        _signal(member, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=grace_s)
    process.wait()


def _members(session_id: int) -> list[psutil.Process]:
    """Every process of the session, also those whose parent has died and so are no longer anyone's children."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id:
                members.append(process)
        except OSError:  # ended between the listing and the question
            continue
    return members


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
