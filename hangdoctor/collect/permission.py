"""Explain why the kernel refuses to let us read a process, and exactly what to do about it."""

import os
from dataclasses import dataclass
from pathlib import Path

SYS_PTRACE = 1 << 19
NEXT_TIME = (
    "For next time, without any privilege: start the job under `areal-debug hang watch -- COMMAND` (a parent may read its "
    "children), or put `import faulthandler, signal; faulthandler.register(signal.SIGUSR1, all_threads=True)` into the "
    "program; then `kill -USR1 PID` writes its stacks to its stderr, and `areal-debug hang diagnose LOG` reads them."
)


@dataclass(frozen=True, slots=True)
class Access:
    """What decides whether this process may read another: Yama's scope (None without Yama), our
    capability, uids.
    """

    ptrace_scope: int | None
    may_ptrace: bool
    our_uid: int
    their_uid: int | None
    in_container: bool


def explain_refusal(access: Access) -> str:
    """Return what to do, most likely cause first."""
    if access.their_uid not in (None, access.our_uid) and not access.may_ptrace:
        cause = f"It belongs to uid {access.their_uid} and this command runs as uid {access.our_uid}: run it as that user or with sudo."
    elif access.ptrace_scope == 1:
        cause = (
            "kernel.yama.ptrace_scope is 1, so only a parent may read a process: run this with sudo, or allow it until the next "
            "boot with `sudo sysctl kernel.yama.ptrace_scope=0`."
        )
    elif access.ptrace_scope in (2, 3):
        cause = f"kernel.yama.ptrace_scope is {access.ptrace_scope}: " + (
            "run this with sudo."
            if access.ptrace_scope == 2
            else "no process may read it until a reboot with another value."
        )
    else:
        cause = "The kernel or a seccomp profile refuses process_vm_readv: run this with CAP_SYS_PTRACE."
    if access.in_container:
        cause += (
            " In a container that is `docker run --cap-add SYS_PTRACE`, or in Kubernetes "
            "`securityContext: {capabilities: {add: [SYS_PTRACE]}}`; from the host it works without either."
        )
    return f"{cause} {NEXT_TIME}"


def current_access(their_uid: int | None) -> Access:
    """Return the access facts of this host and this process."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return Access(
        int(scope.read_text()) if scope.exists() else None,
        bool(_effective_capabilities() & SYS_PTRACE),
        os.getuid(),
        their_uid,
        Path("/.dockerenv").exists() or Path("/run/secrets/kubernetes.io").exists(),
    )


def _effective_capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
