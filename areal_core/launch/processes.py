"""Child processes that end when we do: started in sessions of their own, ended with every descendant.

A descendant may leave its session (torchrun gives each rank one of its own), lose its parent, or rewrite the memory that shows its
environment (SGLang's workers do). It rarely does all three, so it is looked for by all three.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import psutil

_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
MARKS = "AREAL_LAUNCH_MARKS"  # one mark for each launcher above a process, outermost first


hurry = threading.Event()  # somebody has asked twice: nobody gets a grace any more


class Child(subprocess.Popen[bytes]):
    """A started process; `mark` stands in the environment of all its descendants."""

    mark: str


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment that keeps numeric libraries to `num_threads`, so that processes do not fight for the cores."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {name: str(num_threads) for name in names}


def start(
    command: list[str], env: Mapping[str, str], output: int | BinaryIO, cwd: Path | None = None
) -> Child:
    """Starts a command in its own session with our environment changed by `env`; both its streams go to `output`.

    On Linux it gets SIGTERM when the thread that started it ends, so that not even SIGKILL to us leaves it behind.
    """
    mark = uuid.uuid4().hex
    marks = os.environ[MARKS] + ":" + mark if MARKS in os.environ else mark
    child = Child(
        command,
        env={**os.environ, **env, MARKS: marks},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        cwd=cwd,
    )
    child.mark = mark
    return child


def _end_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_tree(process: Child, grace_s: float = 10.0) -> None:
    """Ends a process and all its descendants: SIGTERM, then SIGKILL after `grace_s` or in a `hurry`. Fine when it has ended already."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in running_members(process):
            send(member, number)
        deadline = time.monotonic() + grace_s
        while running_members(process) and time.monotonic() < deadline:
            if number == signal.SIGTERM and hurry.is_set():
                break
            process.poll()  # takes the exit code as soon as there is one
            time.sleep(0.05)
    process.wait()


def running_members(process: Child) -> list[psutil.Process]:
    """The process and what runs because of it, also what has left its session or lost its parent."""
    children = _running_children(process.pid)
    members = []
    for candidate in psutil.process_iter():
        try:
            ours = candidate.pid in children or os.getsid(candidate.pid) == process.pid
            if (ours or _is_marked(candidate, process.mark)) and candidate.status() != psutil.STATUS_ZOMBIE:
                members.append(candidate)
        except (OSError, psutil.NoSuchProcess):  # ended between the listing and the question
            continue
    return members


def _running_children(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _is_marked(candidate: psutil.Process, mark: str) -> bool:
    try:
        environment = candidate.environ()
    except psutil.AccessDenied:  # another user's
        return False
    return MARKS in environment and mark in environment[MARKS]


def send(process: psutil.Process, number: int) -> None:
    """Sends a signal, to a process that may have ended."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
