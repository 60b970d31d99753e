"""Ranks that register themselves to be watched, in one folder per job and node.

    rank      rank_3.json: who it is    rank_3.beat: heartbeat    rank_3.stacks: on STACKS_SIGNAL
    watcher   holds the lock of the folder, removes what dead ranks left, and the folder at the end

A rank registers before it tries the lock, and a folder with a rank in it cannot be removed, so no
rank is without a watcher. The standard library only: ranks import this module.
"""

import ctypes
import faulthandler
import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_core.safety.private import make_private
from hangdoctor.collect.process import read_stat, status_lines

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a registered rank write its stacks; frameworks and schedulers use SIGUSR1 and SIGUSR2."""
STACKS_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Registered:
    """One rank. `environment` declares its rank and job; `start_ticks` distinguishes its pid from
    a later process of the same number.
    """

    name: str
    pid: int
    start_ticks: int
    environment: Mapping[str, str]

    @property
    def is_alive(self) -> bool:
        """Whether it runs; False for a zombie."""
        stat = read_stat(self.pid)
        return stat is not None and stat.state not in "ZX" and stat.start_ticks == self.start_ticks


def register(folder: Path, name: str, environment: Mapping[str, str]) -> int:
    """Register this process, and let it write its own stacks when it is signalled.

    Returns:
        The descriptor of its stacks, for `unregister`.

    Raises:
        OSError: the folder cannot be written.
        ForeignOwner: the folder belongs to another user.
    """
    stat = read_stat(os.getpid())
    assert stat is not None
    entry = json.dumps(asdict(Registered(name, os.getpid(), stat.start_ticks, dict(environment))))
    while True:
        make_private(folder)
        try:
            (folder / f"{name}.new").write_text(entry)
            break
        except FileNotFoundError:  # a watcher has just removed the empty folder
            continue
    (folder / f"{name}.new").rename(folder / f"{name}.json")
    stacks = os.open(folder / f"{name}.stacks", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    # What `unregister` restores: a signal that is on its way then does not end this process.
    ctypes.CDLL(None).signal(STACKS_SIGNAL, signal.SIG_IGN.value)
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    return stacks


def unregister(folder: Path, name: str, stacks: int) -> None:
    """Let this process leave the watch."""
    faulthandler.unregister(STACKS_SIGNAL)
    os.close(stacks)
    _remove(folder, name)


def _remove(folder: Path, name: str) -> None:
    """Remove what a rank wrote, its heartbeat included."""
    for ending in ("json", "beat", "stacks"):
        (folder / f"{name}.{ending}").unlink(missing_ok=True)


def take_lock(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of the folder, also in a child that inherits it; None
    where a watcher holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def read_registered(folder: Path) -> list[Registered]:
    """Return the registered ranks, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(Registered(**json.loads(path.read_text())))
        except FileNotFoundError:  # it has just left
            continue
    return found


def remove_dead(folder: Path) -> list[Registered]:
    """Remove what ranks left that ended without unregistering; return them."""
    dead = [rank for rank in read_registered(folder) if not rank.is_alive]
    for rank in dead:
        _remove(folder, rank.name)
    return dead


def remove_empty(folder: Path) -> bool:
    """Remove the folder if no rank is in it; return whether there is none."""
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def own_stacks(file: Path, pid: int) -> str | None:
    """Return the stacks that a registered process writes itself, or None if it does not.

    A process that handles the signal no longer would be ended by it, so it gets none.
    """
    if not file.exists() or not _handles(pid):
        return None
    before = size = file.stat().st_size
    os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + STACKS_WAIT_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, size = size, file.stat().st_size
        if before < last == size:  # complete: it has stopped growing
            return file.read_bytes()[before:].decode(errors="replace")
    return None


def _handles(pid: int) -> bool:
    return bool(int(status_lines(pid).get("SigCgt", "0"), 16) & 1 << (STACKS_SIGNAL - 1))
