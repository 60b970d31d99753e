"""What /proc shows of a process at one moment: state, page faults, wait for a CPU, connections."""

import os
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hangdoctor.collect.process import PROC, stat_fields

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
        if state == ESTABLISHED and inode in own and is_this_host(local, remote)
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


def is_this_host(local: str, remote: str) -> bool:
    """True for a connection of this host with itself: both addresses are the same."""
    return local.rsplit(":", 1)[0] == remote.rsplit(":", 1)[0]
