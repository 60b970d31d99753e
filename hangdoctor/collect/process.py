"""Processes as /proc shows them: parents, commands, states. Linux only, standard library only."""

import os
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hangdoctor.model import ProcessFacts

PROC = Path("/proc")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `environment` is that of its start, or None where /proc refuses access."""

    pid: int
    parent_pid: int
    state: str
    uid: int
    command: tuple[str, ...]
    executable: str
    environment: dict[str, str] | None

    @property
    def is_python(self) -> bool:
        """True if its executable is a Python interpreter (embedded interpreters are not
        recognised).
        """
        return Path(self.executable).name.startswith(("python", "pypy"))


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that we use. `cpu_s` is user plus system time of all threads."""

    state: str
    parent_pid: int
    cpu_s: float
    start_ticks: int


def read_stat(pid: int) -> Stat | None:
    """Return /proc/PID/stat, or None when the process is gone."""
    try:
        fields = stat_fields(PROC / str(pid))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Stat(fields[0], int(fields[1]), (int(fields[11]) + int(fields[12])) / CLOCK_TICKS, int(fields[19]))


def stat_fields(folder: Path) -> list[str]:
    text = (folder / "stat").read_text(errors="replace")
    return text[text.rindex(")") + 2 :].split()  # the name may hold spaces and parentheses


def read_process(pid: int) -> Process | None:
    """Return one process, or None when it is gone."""
    folder = PROC / str(pid)
    stat = read_stat(pid)
    if stat is None:
        return None
    try:
        command = _split_zero((folder / "cmdline").read_bytes())
        uid = folder.stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(
        pid, stat.parent_pid, stat.state, uid, command, _executable(folder, command), _environment(folder)
    )


def process_table() -> dict[int, Process]:
    """Return every process on this host, kernel threads left out."""
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    found = (read_process(pid) for pid in pids)
    return {
        process.pid: process
        for process in found
        if process is not None and (process.command or process.state == "Z")
    }


def descendants(pids: Iterable[int], table: dict[int, Process]) -> list[int]:
    """Return the processes below `pids` (themselves left out), parents before their children."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent_pid, []).append(process.pid)
    waiting, found = list(pids), []
    while waiting:
        below = sorted(children.get(waiting.pop(0), []))
        found += below
        waiting += below
    return found


def ancestors(pid: int, table: dict[int, Process]) -> list[int]:
    """Return the parent of `pid`, its parent, and so on up to the last one in the table."""
    found = []
    while pid in table and table[pid].parent_pid in table:
        pid = table[pid].parent_pid
        found.append(pid)
    return found


def read_facts(pid: int) -> ProcessFacts:
    stat, status = read_stat(pid), status_lines(pid)
    return ProcessFacts(
        state=stat.state if stat else None,
        wchan=_wchan(pid),
        parent_pid=stat.parent_pid if stat else None,
        cpu_s=stat.cpu_s if stat else None,
        voluntary_switches=_whole_number(status, "voluntary_ctxt_switches"),
        involuntary_switches=_whole_number(status, "nonvoluntary_ctxt_switches"),
        start_time=boot_time() + stat.start_ticks / CLOCK_TICKS if stat else None,
        backend=backend_of(PROC / str(pid)),
    )


def backend_of(folder: Path) -> str | None:
    """Return `nccl` or `gloo` by the names of a process's threads; None where they show neither."""
    names = ""
    with suppress(OSError):
        for task in (folder / "task").iterdir():
            with suppress(OSError):  # the thread has ended
                names += (task / "comm").read_text().lower()
    return next((backend for backend in ("nccl", "gloo") if backend in names), None)


def boot_time() -> float:
    """Return the start time of this machine, in seconds since the epoch."""
    for line in (PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise OSError("/proc/stat has no btime line")


def _executable(folder: Path, command: tuple[str, ...]) -> str:
    try:
        return os.readlink(folder / "exe")
    except OSError:  # of another user, or gone: fall back to its command line
        return command[0] if command else ""


def _environment(folder: Path) -> dict[str, str] | None:
    with suppress(OSError):
        entries = _split_zero((folder / "environ").read_bytes())
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return None


def _split_zero(raw: bytes) -> tuple[str, ...]:
    return tuple(part.decode(errors="replace") for part in raw.split(b"\0") if part)


def status_lines(pid: int) -> dict[str, str]:
    try:
        text = (PROC / str(pid) / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def _whole_number(status: dict[str, str], key: str) -> int | None:
    return int(status[key]) if key in status else None


def _wchan(pid: int) -> str | None:
    with suppress(OSError):
        name = (PROC / str(pid) / "wchan").read_text()
        return None if name in ("", "0") else name
    return None


NANOSECONDS = 1e-9
AUTOGRAD_THREAD = "pt_autograd"
GPU_DEVICE = "/dev/nvidia"
ESTABLISHED, LISTENING = "01", "0A"


@dataclass(frozen=True, slots=True)
class ProcState:
    """One process at one moment.

    `state` is that of the main thread. Counters are since its start: `major_faults`, `cpu_wait_s`
    for which its main thread was runnable without a CPU. `autograd_runs` is True if a device thread
    of autograd was running, `has_gpu` if the process uses an NVIDIA device.
    """

    state: str
    major_faults: int = 0
    cpu_wait_s: float = 0.0
    autograd_runs: bool = False
    has_gpu: bool = False


def proc_state(pid: int) -> ProcState | None:
    """Return the state of a process, or None when it is gone."""
    folder = PROC / str(pid)
    try:
        fields = stat_fields(folder)
        cpu_wait = int((folder / "schedstat").read_text().split()[1])
    except OSError:
        return None
    return ProcState(
        fields[0],
        int(fields[9]),
        cpu_wait * NANOSECONDS,
        autograd_runs(folder),
        any(name.startswith(GPU_DEVICE) for name in open_files(pid)),
    )


def autograd_runs(folder: Path) -> bool:
    """True if a device thread of autograd is running or runnable."""
    for task in (folder / "task").iterdir():
        with suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().startswith(AUTOGRAD_THREAD) and stat_fields(task)[0] == "R":
                return True
    return False


def open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process point at; empty where /proc refuses access."""
    found = []
    with suppress(OSError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(entry))
    return found


def sockets(pid: int) -> set[str]:
    """Return the inode numbers of the sockets of a process."""
    return {name[8:-1] for name in open_files(pid) if name.startswith("socket:[")}


def connected_ports(pid: int) -> frozenset[int]:
    """Return the ports on this host that a process has TCP connections to."""
    own = sockets(pid)
    return frozenset(
        port_of(remote)
        for local, remote, state, inode in connections(pid)
        if state == ESTABLISHED and inode in own and local.rsplit(":", 1)[0] == remote.rsplit(":", 1)[0]
    )


def listening_ports(pid: int) -> frozenset[int]:
    """Return the TCP ports that a process accepts connections on."""
    own = sockets(pid)
    return frozenset(
        port_of(local) for local, _, state, inode in connections(pid) if state == LISTENING and inode in own
    )


def listeners(pid: int, ports: Container[int]) -> set[str]:
    """Return the inodes of the sockets that accept connections on these ports, as a process sees
    them: it may be in a network of its own.
    """
    return {i for local, _, state, i in connections(pid) if state == LISTENING and port_of(local) in ports}


def connections(pid: int) -> list[tuple[str, str, str, str]]:
    """Return local address, remote address, state and inode of the TCP sockets that a process can
    see.
    """
    found = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / str(pid) / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                found.append((fields[1], fields[2], fields[3], fields[9]))
    return found


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1], 16)
