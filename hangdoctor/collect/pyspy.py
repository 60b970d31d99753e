"""Run one py-spy dump of one process and interpret its exit code and messages.

Nonblocking first: a hung rank does not move, so torn reads are rare, while a py-spy that is killed
in ptrace can leave its target stopped. py-spy exits with 0, 1 or 2 only, so the cause is read from
its message.
"""

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hangdoctor.collect.errors import PySpyMissing

STARTING = "Failed to find python version"
GONE = ("Failed to get process executable name", "No such process", "Check that the process is running")
REFUSED = ("Permission Denied", "Operation not permitted", "EPERM", "os error 13")
RETRIES = 2
RETRY_AFTER_S = 0.4


@dataclass(frozen=True, slots=True)
class Dump:
    """The result of one attempt: a status of the collection format, the reason, and py-spy's stdout
    and stderr.
    """

    status: str
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
    reading = ["--native"] if native else ["--json", "--nonblocking"]
    done = _run([pyspy, "dump", *reading, "--pid", str(pid)], timeout_s)
    for _ in range(RETRIES):
        if done.status != "not_python":
            break
        time.sleep(RETRY_AFTER_S)
        done = _run([pyspy, "dump", *reading, "--pid", str(pid)], timeout_s)
    if done.status == "not_python" and STARTING not in done.complaint and not native:
        done = _run([pyspy, "dump", "--json", "--pid", str(pid)], timeout_s)
    return done


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


def _meaning(complaint: str) -> tuple[str, str]:
    """Return the status and the reason for a message of py-spy."""
    first = complaint.strip().splitlines()[0] if complaint.strip() else "py-spy failed without a message"
    if any(words in complaint for words in REFUSED):
        return "not_permitted", first
    if any(words in complaint for words in GONE):
        return "gone", "the process ended before it could be dumped"
    if STARTING in complaint:
        return "not_python", "no Python interpreter was found in it (or it has not come up yet)"
    return "not_python", first
