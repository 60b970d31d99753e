"""Run a function on untrusted input in one forked child process that can do little else.

    parent   run_confined(work, bounds) ──fork──>  child    limits, Landlock
                 │ waits: result, death, time               work() ─> value or error
                 │ <────────────── one JSON text on a pipe ─────┘
                 └─ returns the value, or raises: an error of work, or that a limit was reached

The child inherits the terminal, so a whole verb can run in it. A result is JSON and never a pickle:
what a child that was taken over sends is data. It forks without exec because that costs
milliseconds; the command line does so before it starts threads or imports anything large.

The limits follow from the size of the input, so that honest input of any size can be read, and
`AREAL_DEBUG_MEMORY_GIB` and `AREAL_DEBUG_TIME_S` replace them.
"""

import ctypes
import gc
import io
import json
import math
import os
import resource
import select
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from crc32c import crc32c

from areal_core.safety.durable import os_error_of
from areal_core.safety.file_names import open_below
from recorder.errors import DamagedRecord, RecordError
from recorder.landlock import PR_SET_PDEATHSIG, restrict
from recorder.storage import Storage, file_blocks, is_url, location_of

MEMORY_VARIABLE, TIME_VARIABLE = "AREAL_DEBUG_MEMORY_GIB", "AREAL_DEBUG_TIME_S"
GIB = 1 << 30
MEMORY_BYTES, MEMORY_PER_BYTE = GIB, 20
CPU_S, CPU_S_PER_BYTE = 10.0, 1e-6
WALL_S, WALL_PER_CPU_S = 30.0, 5.0  # a slow disk, and other processes on the same cores
URL_BYTES = 100 * GIB  # what a URL may hold is not known
MAX_RESULT_BYTES = 1 << 28
CLEAN_UP_S = 0.5  # of a child after an interrupt
POLL_S = 0.02  # a child can touch some GB of memory in a second
# What Python and its packages read outside of their own folders.
SYSTEM_PATHS = (
    "/usr", "/lib", "/lib64", "/bin", "/opt", "/nix", "/proc/self", "/proc/meminfo", "/proc/cpuinfo",
    "/proc/stat", "/proc/sys", "/sys/devices/system", "/sys/fs/cgroup", "/dev/null", "/dev/zero",
    "/dev/urandom", "/dev/random", "/dev/tty", "/etc/ld.so.cache", "/etc/ld.so.conf.d", "/etc/localtime",
    "/etc/timezone", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki",
    "/etc/mime.types", "/etc/os-release",
)  # fmt: skip


class LimitReached(ValueError):
    """The child needed more than its bounds, or died."""


@dataclass(frozen=True)
class Bounds:
    """What the child may use. `name` is the input's, for messages.

    `memory_bytes` is beyond what the parent has; `cpu_s` and `wall_s` may be infinite. `writes` are
    folders and files; `network` also allows to read any file, as credentials may be anywhere.
    """

    name: str
    reads: tuple[str | Path, ...]
    writes: tuple[str | Path, ...] = ()
    network: bool = False
    memory_bytes: int = MEMORY_BYTES
    cpu_s: float = CPU_S
    wall_s: float = WALL_S + WALL_PER_CPU_S * CPU_S
    cpu_set_by: str = TIME_VARIABLE


def bounds_for(
    inputs: Sequence[str | Path],
    writes: Iterable[str | Path] = (),
    reads: Iterable[str | Path] = (),
    network: bool = False,
    cpu_s: float = CPU_S,
) -> Bounds:
    """Return the bounds for reading paths or URLs, as HELP_OF_LIMITS of areal_debug has them.

    Raises ValueError if a variable that replaces a limit is no positive number.
    """
    remote = [is_url(location_of(place)) for place in inputs]
    is_remote = network or any(remote)
    sizes = (URL_BYTES if far else size_of(place) for place, far in zip(inputs, remote, strict=True))
    size_bytes = sum(sizes)
    cpu_s = number_in(TIME_VARIABLE) or cpu_s + CPU_S_PER_BYTE * size_bytes
    memory = number_in(MEMORY_VARIABLE)
    return Bounds(
        name=", ".join(map(str, inputs)),
        reads=(*inputs, *reads, *(["/"] if is_remote else [])),
        writes=tuple(writes),
        network=is_remote,
        memory_bytes=int(memory * GIB) if memory else MEMORY_BYTES + MEMORY_PER_BYTE * size_bytes,
        cpu_s=cpu_s,
        wall_s=WALL_S + WALL_PER_CPU_S * cpu_s,
    )


def number_in(variable: str) -> float | None:
    """Return the positive number in an environment variable, None if it is not set."""
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ValueError(f"{variable} is {text!r}: expected a positive number")
    return number


def size_of(path: str | Path) -> int:
    """Bytes on disk of a file, or of all files below a folder; 0 if absent. Links do not count."""
    try:
        facts = os.stat(path)
    except OSError:
        return 0
    if not stat.S_ISDIR(facts.st_mode):
        return facts.st_blocks * 512 if stat.S_ISREG(facts.st_mode) else 0
    total, folders = 0, [os.fspath(path)]
    while folders:
        try:
            # deterministic: the whole folder counts
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        files = (entry for entry in entries if entry.is_file(follow_symlinks=False))
        total += sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in files)
    return total


def run_confined(
    work: Callable[[], Any],
    bounds: Bounds,
    errors: Sequence[type[Exception]] = (),
    announce: Callable[[str], None] = lambda active: None,
) -> Any:
    """Return `work()`, which must be JSON, computed in a child process within the bounds.

    Args:
        errors: raised here as they were in the child, with their text; the most special first. Of
            others, a ValueError is raised as ValueError and an OSError as OSError.
        announce: called in the child with what is active, before the work.

    Raises:
        LimitReached: a limit was reached, or the child died.
        SystemExit, KeyboardInterrupt: as in the child.
        RuntimeError: any other exception, a defect of ours, whose traceback the child has printed.
    """
    # 1 s less: the kernel kills at the hard limit, and says at the soft one why
    allowed_s = cpu_allowed_s() - time.process_time() - 1
    if allowed_s < bounds.cpu_s:
        bounds = replace(bounds, cpu_s=max(allowed_s, 0), cpu_set_by="`ulimit -t`")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # a stream in memory, such as a test's, gets the child's output together with the result
    relayed = [name for name in ("stdout", "stderr") if not has_descriptor(getattr(sys, name))]
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # from Python 3.12 on: other threads may hold locks; the work uses nothing of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        work_in_child(work, bounds, errors, announce, relayed, writing)
    os.close(writing)
    try:
        document = wait_for(pid, reading, bounds)
    finally:
        os.close(reading)
    for name in relayed:
        getattr(sys, name).write(document[name])
    if "error" in document:
        raise_again(document["error"], bounds, errors)
    return document["value"]


def has_descriptor(stream: Any) -> bool:
    try:
        return stream is None or int(stream.fileno()) >= 0
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return False


def work_in_child(
    work: Callable[[], Any],
    bounds: Bounds,
    errors: Sequence[type[Exception]],
    announce: Callable[[str], None],
    relayed: Sequence[str],
    writing: int,
) -> NoReturn:
    """Give up rights, work, send the result; end without the exit handlers of the parent."""
    gc.freeze()  # what the parent's libraries made cannot be finalised without their threads
    captured = {name: io.StringIO() for name in relayed}
    code = 1
    try:
        for name, text in captured.items():
            setattr(sys, name, text)
        try:
            announce(", ".join(limit(bounds)))
            result = json.dumps({"value": work()})
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except BaseException as error:
            result = json.dumps({"error": described(error, errors)})
        printed = json.dumps({name: text.getvalue() for name, text in captured.items()})
        send(writing, f"{result}\n{printed}".encode())
        code = 0
    finally:
        os._exit(code)


def limit(bounds: Bounds) -> list[str]:
    """Apply the bounds to this process; return what is active."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    active = [f"memory {bounds.memory_bytes / GIB:.3g} GiB"]
    if math.isfinite(bounds.cpu_s):
        cpu = math.ceil(time.process_time() + bounds.cpu_s)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, min(cpu + 5, cpu_allowed_s())))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        active.append(f"CPU {bounds.cpu_s:.3g} s")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    reads = (*bounds.reads, *SYSTEM_PATHS, *python_paths())
    landlock = restrict(reads, (*bounds.writes, os.devnull), bounds.network)
    return [*active, *([landlock] if landlock else [])]


def python_paths() -> list[str]:
    own = str(Path(__file__).resolve().parents[1])
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [path for path in (sys.prefix, sys.base_prefix, own, *sys.path, *libraries) if path]


def status_of(pid: int) -> tuple[int, bool]:
    """Bytes of memory that a process has of its own, and whether it runs or is ready to."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, False
    facts = {name: text for name, _, text in (line.partition(":") for line in lines)}
    memory = [int(facts[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in facts]
    return sum(memory) * 1024, facts.get("State", "").strip().startswith("R")


def cpu_allowed_s() -> int:
    """CPU time that this shell allows a process (`ulimit -t`)."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def described(error: BaseException, errors: Sequence[type[Exception]]) -> list[Any]:
    """Describe an error as JSON; a defect of ours is printed with its traceback."""
    for number, kind in enumerate(errors):
        if isinstance(error, kind):
            return ["known", number, str(error)]
    if cause := os_error_of(error):
        return ["OSError", cause.errno, cause.strerror or str(cause), str(cause.filename or "")]
    if isinstance(error, ValueError):
        return ["ValueError", str(error)]
    if isinstance(error, KeyboardInterrupt):
        return ["KeyboardInterrupt"]
    if isinstance(error, SystemExit):
        return ["SystemExit", error.code if isinstance(error.code, int) else int(error.code is not None)]
    traceback.print_exception(error)
    return ["defect", f"{type(error).__name__}: {error}"]


def raise_again(described: Sequence[Any], bounds: Bounds, errors: Sequence[type[Exception]]) -> NoReturn:
    name, *facts = described
    if name == "known":
        kind = errors[facts[0]]
        raise kind.__new__(kind, facts[1])  # whatever the arguments of its constructor
    if name == "OSError":
        code, text, file = facts
        raise OSError(code, text, file) if file else OSError(code, text)
    if name == "ValueError":
        raise ValueError(facts[0])
    if name == "defect":
        raise RuntimeError(
            f"the child that read {bounds.name} failed with {facts[0]}: its traceback is above"
        )
    raise KeyboardInterrupt if name == "KeyboardInterrupt" else SystemExit(facts[0])


def too_much(bounds: Bounds, limit: str, variable: str) -> str:
    return (
        f"reading {bounds.name} needs more than {limit}, the limit for an input of its size or of this shell: "
        f"it may be made to exhaust this machine; set {variable} to allow more"
    )


def send(writing: int, data: bytes) -> None:
    """Write all bytes to the pipe."""
    view = memoryview(data)
    while view:
        view = view[os.write(writing, view) :]


def wait_for(pid: int, reading: int, bounds: Bounds) -> dict[str, Any]:
    """Return what the child sent. Raises LimitReached if it ended otherwise or had to be ended.

    An interrupt at a terminal reaches the child, too, which removes what it has not finished.
    """
    idle_s, looked_at = 0.0, time.monotonic()
    most_memory = bounds.memory_bytes + status_of(os.getpid())[0]
    received, is_open, status = bytearray(), True, None
    try:
        while is_open or status is None:
            if not is_open:
                time.sleep(0.001)
            elif select.select([reading], [], [], POLL_S)[0]:
                block = os.read(reading, 1 << 20)
                received += block
                is_open = bool(block)
            elif status is not None:  # another process has inherited the pipe
                break
            if status is None:
                done, code = os.waitpid(pid, os.WNOHANG)
                status = code if done else None
            memory, is_ready = status_of(pid)
            now = time.monotonic()
            if not is_ready:  # else other processes may be the reason; its CPU time is limited
                idle_s += min(now - looked_at, 10 * POLL_S)
            looked_at = now
            if idle_s > bounds.wall_s:
                raise LimitReached(too_much(bounds, f"{bounds.wall_s:.3g} s of waiting", TIME_VARIABLE))
            if memory > most_memory or len(received) > MAX_RESULT_BYTES:
                limit = f"{bounds.memory_bytes / GIB:.3g} GiB of memory"
                raise LimitReached(too_much(bounds, limit, MEMORY_VARIABLE))
    except KeyboardInterrupt:
        ends_at = time.monotonic() + CLEAN_UP_S
        while status is None and time.monotonic() < ends_at:
            time.sleep(0.01)
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
        raise
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return parsed(bytes(received), status, bounds)


def parsed(data: bytes, status: int, bounds: Bounds) -> dict[str, Any]:
    """Parse what the child sent. Raises LimitReached if that is nothing: it died."""
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and bounds.cpu_set_by != TIME_VARIABLE):
        raise LimitReached(too_much(bounds, f"{bounds.cpu_s:.3g} s of CPU time", bounds.cpu_set_by))
    try:
        result, printed = data.split(b"\n")
        document: dict[str, Any] = json.loads(result) | json.loads(printed)
    except (ValueError, TypeError, RecursionError):
        how = signal.Signals(ended_by).name if ended_by else f"code {os.waitstatus_to_exitcode(status)}"
        raise LimitReached(
            f"the process that reads {bounds.name} ended with {how}: the input is damaged, or made to attack its reader"
        ) from None
    return document


ERRORS = (DamagedRecord, RecordError)  # of a child that reads a record
OnStep = Callable[[int], None]
Progress = Callable[[int, Callable[[OnStep], None]], None]


def no_progress(num_steps: int, work: Callable[[OnStep], None]) -> None:
    work(lambda step: None)


def is_in_memory(place: str | os.PathLike[str]) -> bool:
    """Return whether a URL means files in this process's memory, which a child cannot change."""
    return location_of(place).startswith("memory:")


def in_child(work: Callable[[], Any], inputs: Sequence[str | os.PathLike[str]], *writes: Path) -> Any:
    """Return `work()`, JSON, from a confined child that reads the inputs.

    Raises what it raises, and LimitReached.
    """
    if any(map(is_in_memory, inputs)):
        return work()
    return run_confined(work, bounds_for([location_of(place) for place in inputs], writes), errors=ERRORS)


def write_file(storage: Storage, name: str, folder: Path) -> str:
    """Write a file of a record below a folder, fsync it, return its crc32c as hex.

    A file that is there already is of a killed process, and replaced. Raises DamagedRecord if the
    record has no such regular file, UnsafeName.
    """
    if storage.size(name) is None:
        raise DamagedRecord(name, "is missing or no regular file")
    path = folder / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    crc = 0
    with open(open_below(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        for block in file_blocks(storage, name):
            file.write(block)
            crc = crc32c(block, crc)
        file.flush()
        os.fsync(file.fileno())
    return f"{crc:08x}"
