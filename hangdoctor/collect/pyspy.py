"""Dump one process: /proc facts, one run of py-spy, and the outcome of the attempt.

Nonblocking first: a hung rank does not move, so torn reads are rare, while a py-spy that is killed
in ptrace can leave its target stopped. py-spy exits with 0, 1 or 2 only, so the cause is read from
its message. Where the kernel refuses, the text says why and exactly what to do about it.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from areal_core.safety.secrets import Masker
from hangdoctor.collect.discover import Target
from hangdoctor.collect.process import read_facts, read_stat, status_lines
from hangdoctor.collect.registered import own_stacks
from hangdoctor.collect.write import write_json, write_text
from hangdoctor.errors import PySpyMissing
from hangdoctor.model import Status

STARTING = "Failed to find python version"
GONE = ("Failed to get process executable name", "No such process", "Check that the process is running")
REFUSED = ("Permission Denied", "Operation not permitted", "EPERM", "os error 13")
RETRIES = 2
RETRY_AFTER_S = 0.4
SYS_PTRACE = 1 << 19
NEXT_TIME = (
    "For next time, without any privilege: start the job under `areal-debug hang watch -- COMMAND` (a parent may read its "
    "children), or put `import faulthandler, signal; faulthandler.register(signal.SIGUSR1, all_threads=True)` into the "
    "program; then `kill -USR1 PID` writes its stacks to its stderr, and `areal-debug hang diagnose LOG` reads them."
)


@dataclass(frozen=True, slots=True)
class Dump:
    """The result of one attempt: a status of the collection format, the reason, and py-spy's stdout
    and stderr.
    """

    status: Status
    detail: str
    output: str
    complaint: str


def find_pyspy() -> str:
    """Return the py-spy next to this interpreter, else the one on PATH.

    Raises:
        PySpyMissing: there is none.
    """
    sibling = Path(sys.executable).with_name("py-spy")
    for candidate in (str(sibling), shutil.which("py-spy")):
        if candidate and _run([candidate, "--version"], timeout_s=10).status == "dumped":
            return candidate
    raise PySpyMissing(
        f"py-spy is neither next to {sys.executable} nor on PATH. Install it with `{sys.executable} -m pip install py-spy` "
        "(in a read-only container: `PYTHONUSERBASE=/tmp/py-spy pip install --user py-spy`, then put /tmp/py-spy/bin on PATH)."
    )


def dump(pyspy: str, pid: int, timeout_s: float, native: bool = False) -> Dump:
    """Return the stacks of one process: JSON, or text with native frames, which pauses the process
    for a moment.

    Retried for an interpreter that is still starting and for a torn read of one that moves; the
    last attempt pauses it, so that it cannot move.
    """
    done = dump_once(pyspy, pid, timeout_s, native)
    for _ in range(RETRIES):
        if done.status != "not_python":
            break
        time.sleep(RETRY_AFTER_S)
        done = dump_once(pyspy, pid, timeout_s, native)
    if done.status == "not_python" and STARTING not in done.complaint and not native:
        done = _run([pyspy, "dump", "--json", "--pid", str(pid)], timeout_s)
    return done


def dump_once(pyspy: str, pid: int, timeout_s: float, native: bool = False) -> Dump:
    """Return the result of one attempt, which may fail for a process that moves."""
    reading = ["--native"] if native else ["--json", "--nonblocking"]
    return _run([pyspy, "dump", *reading, "--pid", str(pid)], timeout_s)


def _run(command: list[str], timeout_s: float) -> Dump:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except OSError as error:  # absent, or built for another processor
        return Dump("not_python", f"{command[0]} does not run here: {error}", "", "")
    except subprocess.TimeoutExpired:
        return Dump("timed_out", f"py-spy did not finish in {timeout_s:g} s", "", "")
    if done.returncode == 0:
        return Dump("dumped", "", done.stdout, "")
    return Dump(*_meaning(done.stderr), done.stdout, done.stderr)


def _meaning(complaint: str) -> tuple[Status, str]:
    first = complaint.strip().splitlines()[0] if complaint.strip() else "py-spy failed without a message"
    if any(words in complaint for words in REFUSED):
        return "not_permitted", first
    if any(words in complaint for words in GONE):
        return "gone", "the process ended before it could be dumped"
    if STARTING in complaint:
        return "not_python", "no Python interpreter was found in it (or it has not come up yet)"
    return "not_python", first


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
    return f"{cause_of_refusal(access)} {NEXT_TIME}"


def cause_of_refusal(access: Access) -> str:
    """Return why the kernel refuses, and what allows it."""
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
    return cause


def current_access(their_uid: int | None) -> Access:
    """Return the access facts of this host and this process."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return Access(
        int(scope.read_text()) if scope.exists() else None,
        bool(int(status_lines(os.getpid()).get("CapEff", "0"), 16) & SYS_PTRACE),
        os.getuid(),
        their_uid,
        Path("/.dockerenv").exists() or Path("/run/secrets/kubernetes.io").exists(),
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a collection. Times in seconds; `timeout_s` is for one dump of one process.

    `registered` is a folder of ranks that write their own stacks where py-spy may not read them.
    """

    num_samples: int = 2
    interval_s: float = 3.0
    timeout_s: float = 10.0
    native: bool = False
    log_lines: int = 200
    host: str = field(default_factory=socket.gethostname)
    registered: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of dumping one target in one sample."""

    status: Status
    detail: str


def dump_target(
    target: Target, tool: str, folder: Path, sample: int, options: Options, mask: Masker
) -> Outcome:
    """Dump one process in one sample: /proc facts first, since py-spy's own reading would change
    them.
    """
    place = folder / f"samples/{sample}/{target.name}"
    stat = read_stat(target.pid)
    if stat is None or stat.state in "ZX":
        return Outcome("gone", f"pid {target.pid} ended before sample {sample}")
    write_json(folder / f"proc/{sample}/{target.name}.json", asdict(read_facts(target.pid)))
    if not target.process.is_python and target.role == "child":
        return Outcome("not_python", f"{target.process.executable} is no Python")
    done = dump(tool, target.pid, options.timeout_s)
    if done.status == "not_permitted" and options.registered is not None:
        own = own_stacks(options.registered / f"{target.name}.stacks", target.pid)
        if own is not None:
            write_text(place.with_name(f"{target.name}.txt"), mask.text(own))
            return Outcome("dumped", cause_of_refusal(current_access(target.process.uid)))
    if done.status != "dumped":
        write_text(place.with_name(f"{target.name}.error.txt"), mask.text(done.complaint or done.detail))
    else:
        write_text(place.with_name(f"{target.name}.json"), mask.document(done.output))
        if options.native and stat.state != "T":
            _second_pass(target, tool, place, options, mask)
    if stat.state in "Tt":
        return Outcome("stopped", f"pid {target.pid} is stopped (state {stat.state}): SIGCONT would wake it")
    if done.status == "not_permitted":
        return Outcome(done.status, explain_refusal(current_access(target.process.uid)))
    return Outcome(done.status, done.detail)


def _second_pass(target: Target, tool: str, place: Path, options: Options, mask: Masker) -> None:
    """Dump native frames, which py-spy cannot combine with JSON; a failure saves its message and
    keeps the first pass.
    """
    done = dump(tool, target.pid, options.timeout_s, native=True)
    ending = "native.txt" if done.status == "dumped" else "native.error.txt"
    text = done.output if done.status == "dumped" else done.complaint
    write_text(place.with_name(f"{target.name}.{ending}"), mask.text(text))
