"""Evidence besides stacks: environment, log tail, error file, Flight Recorder, GPUs, NCCL RAS,
source lines.

Every function returns text or bytes, or None when there is nothing: a collection never fails
because one is missing.
"""

import json
import linecache
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from areal_core.safety.secrets import names_secret
from hangdoctor.collect.process import PROC
from hangdoctor.model import NUMBER

KEPT_VARIABLE = re.compile(
    r"^(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_(?:NAME|RANK|WORLD_SIZE)|MASTER_\w+|TORCHELASTIC_\w+|"
    r"SLURM_\w+|NCCL_\w+|TORCH_(?:NCCL|FR|DISTRIBUTED|INCLUDE|CPP_LOG)\w*|GLOO_\w+|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|"
    r"OMP_NUM_THREADS)$"
)
MAX_TAIL_BYTES = 256 << 10
MAX_ERROR_FILE_BYTES = 4 << 20
RAS_PORT = 28028
QUICK_S = 5.0
MOST_OUTPUT_BYTES = 1 << 22  # of a helper program: that of nvidia-smi for 16 GPUs is 10 kB
DUMP_WAIT_S = 10.0
MAX_LINE_CHARACTERS = 200


def selected_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that define how a job was started: an allow-list, and none whose name
    looks like a credential.
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if KEPT_VARIABLE.match(name) and not names_secret(name)
    }


def log_tail(pid: int, num_lines: int) -> str | None:
    """Return the last lines of the files that a process writes its stdout and stderr to; pipes and
    terminals have none.
    """
    tails: dict[str, str] = {}
    for descriptor in ("1", "2"):
        link = PROC / str(pid) / "fd" / descriptor
        try:
            path = os.readlink(link)
            if path not in tails and link.is_file():
                tails[path] = _last_lines(link, num_lines)
        except OSError:
            continue
    return "".join(tails.values()) or None


def _last_lines(path: Path, num_lines: int) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - MAX_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return "".join(lines[-num_lines:])


def error_files(environment: dict[str, str]) -> dict[int, str]:
    """Return rank to torchelastic error file, for this rank and the other ranks of the host.

    The file of a rank that is gone is stored next to those of the living ranks, as
    `.../attempt_0/LOCAL_RANK/error.json`.
    """
    if "TORCHELASTIC_ERROR_FILE" not in environment:
        return {}
    own = Path(environment["TORCHELASTIC_ERROR_FILE"])
    rank, local = environment.get("RANK", ""), environment.get("LOCAL_RANK", "")
    if not (rank.isdigit() and local.isdigit() and own.parent.name == local):
        return {}
    found = {}
    for path in own.parent.parent.glob(f"*/{own.name}"):
        if path.parent.name.isdigit() and path.stat().st_size <= MAX_ERROR_FILE_BYTES:
            found[int(rank) - int(local) + int(path.parent.name)] = path.read_text(errors="replace")
    return found


def flight_recorder_dump(rank: int, environment: dict[str, str], started: float, uid: int) -> bytes | None:
    """Return a rank's Flight Recorder dump, or None.

    It is requested through the rank's pipe where it listens on one; else it is a file written since
    `started` (seconds since the epoch; older files belong to another run) by the rank's user, since
    anybody may put one into /tmp.
    """
    now = time.time()
    requested = _request_dump(rank, environment)
    since, deadline = (now, now + DUMP_WAIT_S) if requested else (started, now)
    prefix = _first(environment, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    cache = Path(environment.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    prefixes = [prefix] if prefix else [str(cache / "torch/comm_lib_trace_rank_"), "/tmp/nccl_trace_rank_"]
    while True:
        for candidate in prefixes:
            if content := _settled(Path(f"{candidate}{rank}"), since, uid):
                return content
        if time.time() >= deadline:
            return None
        time.sleep(0.1)


def _request_dump(rank: int, environment: dict[str, str]) -> bool:
    """Write to the pipe that makes a rank dump; return False when nothing reads it."""
    prefix = _first(environment, "TORCH_FR_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not prefix:
        return False
    try:
        descriptor = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
    return True


def _settled(path: Path, since: float, uid: int) -> bytes | None:
    """Return the file's bytes once it was written after `since` (file times are coarse: 50 ms) and
    stops growing.
    """
    try:
        before = path.stat()
        if before.st_mtime < since - 0.05 or before.st_size == 0 or before.st_uid not in (uid, 0):
            return None
        time.sleep(0.05)
        return path.read_bytes() if path.stat().st_size == before.st_size else None
    except OSError:
        return None


def _first(environment: dict[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One entry of `gpu/K/HOST.json`; None where the driver reports no value."""

    index: int
    utilization_percent: float | None
    power_watts: float | None


def gpus() -> list[Gpu] | None:
    """Return every GPU of this host by nvidia-smi, or None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "--query-gpu=index,utilization.gpu,power.draw"
    text = _quick(["nvidia-smi", query, "--format=csv,noheader,nounits"]) or ""
    known = [card for line in text.splitlines() if len(card := line.split(",")) == 3 and card[0].isdecimal()]
    return [Gpu(int(index), _float(utilization), _float(power)) for index, utilization, power in known]


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Unknown Error]
        return None


def nccl_ras() -> str | None:
    """Return the report of NCCL's RAS service on this host, or None without one."""
    if shutil.which("ncclras"):
        return _quick(["ncclras", "-v"])
    try:
        with socket.create_connection(("localhost", RAS_PORT), timeout=1.0) as service:
            service.sendall(b"verbose status\n")
            return _text_of(service.fileno())
    except OSError:
        return None


def _quick(command: list[str]) -> str | None:
    """Return what a program prints; it may hang in its driver, where no signal ends it."""
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb") as written, suppress(OSError, subprocess.TimeoutExpired):
        program = subprocess.Popen(command, stdout=written, stderr=subprocess.DEVNULL, start_new_session=True)
        written.close()
        text = _text_of(reading)
        if text is None:
            os.killpg(program.pid, signal.SIGKILL)
        return text if program.wait(0.5) == 0 else None
    return None


def _text_of(descriptor: int) -> str | None:
    """Read to the end, at most QUICK_S and MOST_OUTPUT_BYTES. Raises OSError."""
    data, ends_at = b"", time.monotonic() + QUICK_S
    while select.select([descriptor], [], [], max(ends_at - time.monotonic(), 0))[0]:
        block = os.read(descriptor, 1 << 16)
        data += block
        if not block or len(data) > MOST_OUTPUT_BYTES:
            return data.decode(errors="replace") or None if not block else None
    return None


def source_lines(dumps: Iterable[str]) -> dict[str, str]:
    """Return `FILE:LINE` to stripped source for every frame of py-spy JSON dumps whose file is
    readable here.
    """
    places = frozenset[tuple[str, int]]().union(*(_places(NUMBER.sub(r"\g<1>0", dump)) for dump in dumps))
    found = {f"{file}:{line}": linecache.getline(file, line).strip() for file, line in sorted(places)}
    return {place: text[:MAX_LINE_CHARACTERS] for place, text in found.items() if text}


@lru_cache(maxsize=64)  # equal stacks of many ranks
def _places(dump: str) -> frozenset[tuple[str, int]]:
    return frozenset(
        (frame["filename"], frame["line"]) for thread in json.loads(dump) for frame in thread["frames"]
    )
