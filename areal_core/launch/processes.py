"""Child processes that end with this one: each in its own session, ended with every descendant.

A descendant may leave its session (torchrun gives each rank its own), lose its parent, or overwrite
the memory that shows its environment (SGLang's workers do). It rarely does all three, so all three
are checked.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import psutil

_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
MARKS = "AREAL_LAUNCH_MARKS"  # one mark for each launcher above a process, outermost first


hurry = threading.Event()  # a second signal arrived: no more grace periods


class Child(subprocess.Popen[bytes]):
    """A started process; `mark` is in the environment of all its descendants."""

    mark: str


def thread_limits(num_threads: int) -> dict[str, str]:
    """Return variables that limit numeric libraries to `num_threads` per process."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {name: str(num_threads) for name in names}


def start(
    command: list[str],
    env: Mapping[str, str],
    output: int | BinaryIO,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = True,
) -> Child:
    """Start a command in its own session, in the current environment changed by `env`.

    Both of its streams go to `output`. On Linux it gets SIGTERM when the thread that started it
    ends, so that it ends even if this process is killed by SIGKILL.

    Args:
        pass_fds: open files that the command may use by their number.
        new_session: False for one that uses the terminal.
    """
    mark = uuid.uuid4().hex
    child = Child(
        command,
        env=marked_environment(env, mark),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=new_session,
        pass_fds=pass_fds,
        preexec_fn=partial(_LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
        if sys.platform == "linux"
        else None,
        cwd=cwd,
    )
    child.mark = mark
    return child


def marked_environment(env: Mapping[str, str], mark: str) -> dict[str, str]:
    marks = os.environ[MARKS] + ":" + mark if MARKS in os.environ else mark
    return {**os.environ, **env, MARKS: marks}


def end_tree(process: Child, grace_s: float = 10.0) -> None:
    """End a process and all its descendants: SIGTERM, then SIGKILL after `grace_s` or in a `hurry`.

    The process may have ended already.
    """
    members = find_members(process)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in members:
            send(member, number)
        deadline = time.monotonic() + grace_s
        # A process that is exiting has no environment any more, so it is found once and then kept.
        while (members := running(members | find_members(process))) and time.monotonic() < deadline:
            if number == signal.SIGTERM and hurry.is_set():
                break
            process.poll()  # collects the exit code as soon as there is one
            time.sleep(0.05)
    process.kill()  # if it was not found above: its id is kept until it is waited for
    process.wait()


def running(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Return those that have not ended; a zombie has."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def find_members(process: Child) -> set[psutil.Process]:
    """Return the process and its descendants, in its session or not, orphans included."""
    children = _running_children(process.pid)
    if process.poll() is None:  # itself: a fork that executes nothing does not show the mark
        children.add(process.pid)
    members = set()
    for candidate in psutil.process_iter():
        try:
            ours = candidate.pid in children or os.getsid(candidate.pid) == process.pid
            if ours or _is_marked(candidate, process.mark):
                members.add(candidate)
        except (OSError, psutil.NoSuchProcess):  # ended between the listing and the query
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
    """Send a signal to a process that may have ended."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
