"""One writer a folder: a lock file that its holder locks by flock, and that names it.

The kernel frees the lock when the holder ends, also when it is killed, and on NFS when its machine
does. The file has run, process and host for people, and a token that `check` compares before every
commit: where a file system shares no locks between machines, or has none, a second writer takes the
file over, and the first one stops before its next commit. An earlier attempt of the same run on
another machine was ended by its launcher, and is not waited for.
"""

import fcntl
import json
import os
import socket
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from areal_core.safety.file_names import open_below
from areal_core.safety.printable import printable

RUN_ID = "AREAL_RUN_ID"  # set by the launcher, the same for all attempts of a run
RETRY_S = 0.5  # a reader that asks who holds a lock has it for a moment
MAX_BYTES = 1 << 16
HELD: set[int] = set()  # descriptors of this process


@dataclass(frozen=True)
class Holder:
    """Who holds a lock: `token` is of this lock alone, `run` is shared by the attempts of a run,
    `name` is the run's for people, `since` is UTC.
    """

    token: str
    run: str
    name: str
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        name = f" ({printable(self.name, 120)})" if self.name else ""
        return (
            f"run {printable(self.run, 40)}{name}, process {self.pid} on host "
            f"{printable(self.host, 80)}, since {printable(self.since, 40)}"
        )


class Held(ValueError):
    """A live process holds the lock; the message is who, as a phrase."""


class Lost(ValueError):
    """The lock was removed, or taken by another process."""


class Lock:
    """A lock that this process holds until `release`, its end, or until nothing refers to it."""

    def __init__(self, path: Path, holder: Holder, descriptor: int) -> None:
        self.path, self.holder = path, holder
        HELD.add(descriptor)
        self._finalizer = weakref.finalize(self, _remove, path, holder, descriptor)

    def check(self) -> None:
        """Raise Lost unless the lock is still ours."""
        check(self.path, self.holder.token)

    def release(self) -> None:
        """Remove the lock. Only when no process of the run writes any more."""
        self._finalizer()

    def leave(self) -> None:
        """Hold the lock until this process ends: others of the run may still write."""
        self._finalizer.detach()


def take(path: Path, run: str, name: str, token: str = "") -> Lock:
    """Take the lock at `path`, in a folder that exists; `token` is by default a new one.

    Raises:
        Held: a live process has it.
        OSError: the file cannot be written.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    holder = Holder(token or new_token(), run, name, socket.gethostname(), os.getpid(), now)
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            descriptor = open_below(path.parent, path.name, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # of another user
            if (who := live_holder(path, run)) is None:
                raise
            raise Held(who) from None
        try:
            if _lock(descriptor, fcntl.LOCK_EX):
                if _is_at(descriptor, path):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, json.dumps(asdict(holder)).encode())
                    lock, descriptor = Lock(path, holder, descriptor), -1
                    return lock
            elif _is_earlier_attempt(found := _read(path), run):
                path.unlink(missing_ok=True)
            elif time.monotonic() > deadline:
                raise Held(str(found or "an unknown process"))
            else:
                time.sleep(RETRY_S / 10)
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def check(path: Path, token: str) -> None:
    """Raise Lost unless the lock has the token."""
    if not path.exists():
        raise Lost(f"the lock {path} was removed")
    if (found := _read(path)) is None or found.token != token:
        raise Lost(f"the lock {path} was taken by {found or 'an unknown process'}")


def live_holder(path: Path, run: str = "") -> str | None:
    """Return who holds the lock, as a phrase; None if nobody does.

    `run` is the id of the run that asks.
    """
    try:
        descriptor = open_below(path.parent, path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if _lock(descriptor, fcntl.LOCK_SH) or _is_earlier_attempt(found := _read(path), run):
            return None
    finally:
        os.close(descriptor)
    return str(found or "an unknown process")


def new_token() -> str:
    """A token for `take`, which other processes may `check`."""
    return uuid.uuid4().hex


def run_id() -> str:
    """The id of this run: the launcher's, or a new one."""
    return os.environ.get(RUN_ID) or uuid.uuid4().hex[:12]


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a file, and return whether no other process has it; also where there are no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a file that was opened still has its name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _is_earlier_attempt(found: Holder | None, run: str) -> bool:
    return found is not None and found.run == run and found.host != socket.gethostname()


def _read(path: Path) -> Holder | None:
    """Read a lock file; None if there is none, or it has other contents."""
    try:
        with open(open_below(path.parent, path.name), "rb") as file:
            found = json.loads(file.read(MAX_BYTES))
        texts = {name: str(found[name]) for name in ("token", "run", "name", "host", "since")}
        return Holder(**texts, pid=int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _remove(path: Path, holder: Holder, descriptor: int) -> None:
    """Remove a lock that is still its holder's, and free it; not in a forked child."""
    if os.getpid() != holder.pid:
        return
    with suppress(Lost, OSError):
        check(path, holder.token)
        path.unlink()
    HELD.discard(descriptor)
    os.close(descriptor)


def _forget() -> None:
    """Close a forked child's copies of the locks, which would outlive their holder."""
    while HELD:
        os.close(HELD.pop())


os.register_at_fork(after_in_child=_forget)
