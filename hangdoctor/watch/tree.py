"""The processes of a watched job: adopt its orphans, forward signals to it, end all of it."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hangdoctor.collect.process import read_stat

GRACE_S = 10.0
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # <sys/prctl.h>


def end_all(pids: list[int]) -> None:
    """Send SIGTERM to all, then SIGKILL to those that remain: a rank in a collective ignores
    SIGTERM.
    """
    signal_all(pids, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(lives(pid) for pid in pids):
        time.sleep(0.1)
    signal_all(pids, signal.SIGKILL)


def lives(pid: int) -> bool:
    """True if a process runs; one that has ended and waits for its parent does not."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes; those that have ended are left out."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def signals_forwarded_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals to the job while it runs: its end then ends the watcher."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    previous = [
        signal.signal(number, lambda received, _frame: child.send_signal(received)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Be the parent of ranks whose launcher dies, instead of init: still watched, still readable
    under Yama.

    This process is then what it was before: it does not collect the ended children of others.
    """
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
