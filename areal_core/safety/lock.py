"""One writer a folder: a lock file that names its holder, on local and shared file systems.

    take       own file, complete ─ link ─> LOCK                    there is one, and its holder lives: Held
               its holder is dead: claim it by a link to LOCK.DIGEST ─> LOCK as before? ─ rename own file over it
    heartbeat  the holder sets the mtime of LOCK every HEARTBEAT_S
    check      LOCK names us? before every commit; else Lost

Link and rename are atomic on NFS as well, and a lock file is never seen half-written. Of several
processes that find the same dead holder one gets the claim, and only it may replace that very lock.
A claim is a lock itself: that of a dead process is replaced in the same way.

A process of this boot and PID namespace is dead if its PID is gone or was given to a process with
another start time; a suspended one is alive. A process elsewhere cannot be asked: it counts as dead
when its heartbeat has stopped for STALE_S, which no clock of two machines is compared for, and has
been watched not to continue. If it was only suspended, `check` stops it before its next commit. An
earlier attempt of the same run on another machine was ended by its launcher, and is not waited for.
"""

import errno
import hashlib
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from areal_core.safety.durable import sync, write_durably
from areal_core.safety.file_names import open_below
from areal_core.safety.printable import printable

RUN_ID = "AREAL_RUN_ID"  # set by the launcher, the same for all attempts of a run
HEARTBEAT_S = 10.0
STALE_S = 300.0  # without a heartbeat, after which a process on another machine counts as dead
WATCH_S = 3 * HEARTBEAT_S  # that such a heartbeat is watched, because a clock may have jumped
MAX_BYTES = 1 << 24  # 100,000 processes
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


@dataclass(frozen=True)
class Process:
    """A process: `place` is its boot and PID namespace, "" if unknown; `started` in clock ticks."""

    place: str
    pid: int
    started: int


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
        token: of this lock alone.
        run: id of the run, shared by its attempts.
        name: of the run, for people.
        host: of the first process.
        since: UTC time.
        processes: all that write under the lock; it is free when none of them lives.
    """

    token: str
    run: str
    name: str
    host: str
    since: str
    processes: tuple[Process, ...]

    def __str__(self) -> str:
        name = f" ({printable(self.name, 120)})" if self.name else ""
        return (
            f"run {printable(self.run, 40)}{name}, process {self.processes[0].pid} on host "
            f"{printable(self.host, 80)}, since {printable(self.since, 40)}"
        )


class Held(ValueError):
    """A live process holds the lock; the message is who, as a phrase."""


class Lost(ValueError):
    """The lock was removed, or taken by another process."""


@dataclass(frozen=True)
class Found:
    """A lock file as it was read: `holder` is None if it is not one that we wrote completely."""

    holder: Holder | None
    digest: str
    beat: float

    def __str__(self) -> str:
        return str(self.holder or "an unknown process")


class Lock:
    """A lock that this process holds; it beats until `release`, the end of the process or its loss.

    A lock of one process is also released when nothing refers to it, and when the interpreter
    exits.
    """

    def __init__(self, path: Path, holder: Holder) -> None:
        self.path, self.holder = path, holder
        self._ended = threading.Event()
        arguments = (path, holder.token, self._ended)
        threading.Thread(target=_beat, args=arguments, daemon=True, name="lock").start()
        self._finalizer = weakref.finalize(self, _remove, path, holder, self._ended)
        if len(holder.processes) > 1:
            self._finalizer.detach()

    def check(self) -> None:
        """Raise Lost unless the lock is still ours."""
        check(self.path, self.holder.token)

    def release(self) -> None:
        """Remove the lock. Only when no process of the holder writes any more."""
        self._finalizer.detach()
        _remove(self.path, self.holder, self._ended)

    def leave(self) -> None:
        """Leave the lock to the processes that may still write: it is free when they are gone."""
        self._finalizer.detach()
        self._ended.set()


def take(path: Path, run: str, name: str, processes: Sequence[Process] = (), token: str = "") -> Lock:
    """Take the lock at `path`, in a folder that exists.

    Args:
        processes: all that will write under it, this one first; by default this one.
        token: by default a new one.

    Raises:
        Held: a live process has it.
        OSError: the file system refuses.
    """
    holder = Holder(
        token or new_token(),
        run,
        name,
        socket.gethostname(),
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        tuple(processes) or (this_process(),),
    )
    own = path.with_name(f"{path.name}.{holder.token}.new")
    write_durably(own, json.dumps(asdict(holder)).encode())
    try:
        now = own.stat().st_mtime  # of the server of a shared file system, as every heartbeat
        _place(path, own, holder, now)
        _remove_remains(path, now)
    finally:
        own.unlink(missing_ok=True)
    sync(path.parent)
    return Lock(path, holder)


def check(path: Path, token: str) -> None:
    """Raise Lost unless the lock has the token."""
    found = _read(path)
    if found is None:
        raise Lost(f"the lock {path} was removed")
    if found.holder is None or found.holder.token != token:
        raise Lost(f"the lock {path} was taken by {found}")


def live_holder(path: Path, run: str = "") -> str | None:
    """Return who holds the lock, as a phrase; None if it is free or its holder is dead.

    `run` is the id of the run that asks.
    """
    found = _read(path)
    if found is None or _is_dead(found, time.time(), run):
        return None
    return _describe(path, found, time.time())


def new_token() -> str:
    """A token for `take`, which other processes may `check`."""
    return uuid.uuid4().hex


def run_id() -> str:
    """The id of this run: the launcher's, or a new one."""
    return os.environ.get(RUN_ID) or uuid.uuid4().hex[:12]


def this_process() -> Process:
    """This process."""
    return Process(_place_of_pids(), os.getpid(), _start_time(os.getpid()) or 0)


def _place(path: Path, own: Path, holder: Holder, now: float) -> None:
    while True:
        _link(own, path)
        found = _read(path)
        if found is None:  # released since
            continue
        if found.holder is not None and found.holder.token == holder.token:
            return
        if not _is_dead(found, now, holder.run) or not _stays_silent(path, found, holder.run):
            raise Held(_describe(path, found, now))
        claim = path.with_name(f"{path.name}.{found.digest}")
        _place(claim, own, holder, now)
        try:
            if _read(path) == found:
                # a second name, because `own` is still needed where `path` is a claim
                ours = own.with_name(f"{own.name}er")
                _link(own, ours)
                ours.rename(path)
                return
        finally:
            claim.unlink(missing_ok=True)


def _link(own: Path, path: Path) -> None:
    try:
        os.link(own, path)
    except FileExistsError:  # NFS may also say so of a link that it has created
        pass
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(own.read_bytes())


def _read(path: Path) -> Found | None:
    """Read a lock file, None if there is none."""
    try:
        # opening it revalidates what NFS has cached
        with open(open_below(path.parent, path.name), "rb") as file:
            data, beat = file.read(MAX_BYTES), os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Found(_parse(data), hashlib.sha256(data).hexdigest()[:32], beat)


def _parse(data: bytes) -> Holder | None:
    """Parse a lock file; None if it has other contents."""
    try:
        document = json.loads(data)
        processes = tuple(
            Process(str(p["place"]), int(p["pid"]), int(p["started"])) for p in document["processes"]
        )
        texts = {name: str(document[name]) for name in ("token", "run", "name", "host", "since")}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Holder(**texts, processes=processes) if processes else None


def _describe(path: Path, found: Found, now: float) -> str:
    if found.holder is not None and all(_is_here(process) for process in found.holder.processes):
        return str(found)
    return (
        f"{found}, on another machine or in another container; its last heartbeat was {max(0, now - found.beat):.0f} s ago, "
        f"after {STALE_S:.0f} s without one it counts as dead (or remove {path}, if it has ended)"
    )


def _is_dead(found: Found, now: float, run: str) -> bool:
    """Return whether no process of the holder lives, as far as this process can know at once."""
    if found.holder is None:
        return now - found.beat > STALE_S
    here = [process for process in found.holder.processes if _is_here(process)]
    if any(map(_is_running, here)):
        return False
    is_elsewhere = len(here) < len(found.holder.processes)
    return not is_elsewhere or found.holder.run == run or now - found.beat > STALE_S


def _stays_silent(path: Path, found: Found, run: str) -> bool:
    """Watch a heartbeat that has stopped; return at once if it does not decide."""
    if found.holder is not None and (
        found.holder.run == run or all(_is_here(process) for process in found.holder.processes)
    ):
        return True
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(min(1.0, WATCH_S / 10))
        if _read(path) != found:
            return False
    return True


def _is_here(process: Process) -> bool:
    return process.place != "" and process.place == _place_of_pids()


def _is_running(process: Process) -> bool:
    started = _start_time(process.pid)
    return started is not None and started in (process.started, 0)


def _place_of_pids() -> str:
    """The boot and the PID namespace of this process; "" where they cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """Return when a live process started, in clock ticks since boot; None if it is dead.

    0 for a process of another user that this one may not see (`hidepid`). A zombie is dead, unless
    one of its threads has not ended yet.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        num_threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return None
        except PermissionError:
            pass
        return 0
    return int(stat[19]) if stat[0] not in "ZX" or num_threads > 1 else None


def _beat(path: Path, token: str, ended: threading.Event) -> None:
    """Set the mtime of the lock periodically until it is released or lost."""
    while not ended.wait(HEARTBEAT_S):
        with suppress(OSError):  # a server that does not answer for a moment
            try:
                check(path, token)
            except Lost:
                return
            os.utime(path)


def _remove(path: Path, holder: Holder, ended: threading.Event) -> None:
    """Remove a lock that is still its holder's; not in a forked child."""
    ended.set()
    if os.getpid() == holder.processes[0].pid:
        with suppress(Lost, OSError):
            check(path, holder.token)
            path.unlink()


def _remove_remains(path: Path, now: float) -> None:
    for name in os.listdir(path.parent):
        if name.startswith(f"{path.name}."):
            with suppress(FileNotFoundError):
                if now - (path.parent / name).stat().st_mtime > STALE_S:
                    (path.parent / name).unlink()
