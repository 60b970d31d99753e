"""Start a fault program for real, wait until it hangs, collect it, and end every process of it.

A program says in its docstring what it is (`label`, `culprits`, `ranks`, `starts`, `launch`), so it is its own oracle.
Its ranks are started one by one, which is quicker; where torchrun would not change the fault (`launch` is not said) the long
tests use that.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hangdoctor.collect.discover import Search
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.process import descendants, process_table, read_stat
from hangdoctor.collect.sample import Options
from hangdoctor.diagnose import diagnose
from hangdoctor.model import Diagnosis
from hangdoctor.parse.read import read_snapshot

PROGRAMS = Path(__file__).parents[1] / "programs"
REACH_HANG_POINT_S = 120
PROGRAMS_AT_ONCE = 2
STILL_S = 0.5
SETTLE_S = 6


@dataclass(frozen=True)
class Program:
    """What the docstring of a fault program says of it."""

    path: Path
    label: str
    culprits: tuple[int, ...]
    num_ranks: int
    starts: tuple[int, ...]
    launch: str


def read_program(path: Path) -> Program:
    """The program at `path`, as its docstring describes it."""
    told = dict(re.findall(r"^(\w+): (.+)$", path.read_text(), re.MULTILINE))
    num_ranks = int(told["ranks"])
    return Program(
        path,
        told["label"],
        tuple(int(rank) for rank in re.findall(r"\d+", told.get("culprits", ""))),
        num_ranks,
        tuple(int(rank) for rank in told.get("starts", " ".join(map(str, range(num_ranks)))).split()),
        told.get("launch", "any"),
    )


@dataclass(frozen=True)
class RunningProgram:
    """A started program: `pids` of its ranks (or of its launcher) as a user would name them."""

    program: Program
    pids: tuple[int, ...]
    folder: Path


def free_port() -> int:
    """A port that the operating system says is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of(markers: Path, port: int, rank: int, world_size: int) -> dict[str, str]:
    """What torchrun would give a rank, as far as these programs use it."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HANG_POINT_DIR": str(markers),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def commands_of(program: Program, markers: Path) -> list[tuple[list[str], dict[str, str]]]:
    """One command a rank, or one of a launcher, each with its environment."""
    if program.launch in ("any", "plain"):
        port = free_port()
        return [
            ([sys.executable, str(program.path)], environment_of(markers, port, rank, program.num_ranks))
            for rank in program.starts
        ]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={program.num_ranks}",
    ]
    command = [*torchrun, str(program.path)]
    if program.launch == "network_namespace":
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    environment = environment_of(markers, 0, 0, 1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del environment[name]
    return [(command, environment)]


@contextmanager
def running(program: Program, folder: Path) -> Iterator[RunningProgram]:
    """The program at its hang point, every rank of it; all its processes are killed afterwards."""
    markers = folder / "markers"
    markers.mkdir(parents=True)
    started = [
        _start(command, environment, folder / f"{index}.log")
        for index, (command, environment) in enumerate(commands_of(program, markers))
    ]
    pids = tuple(process.pid for process in started)
    try:
        _wait_for_markers(program, markers, started, folder)
        _wait_until_still(pids)
        yield RunningProgram(program, pids, folder)
    finally:
        _kill_tree(pids)
        for process in started:
            process.wait()
            process.stdin.close()


def _start(command: list[str], environment: dict[str, str], log_path: Path) -> subprocess.Popen:
    """With a stdin that stays open and says nothing, as a terminal nobody looks at."""
    with log_path.open("w") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
        )


def _wait_for_markers(program: Program, markers: Path, started: list[subprocess.Popen], folder: Path) -> None:
    deadline = time.monotonic() + REACH_HANG_POINT_S
    while len(list(markers.iterdir())) < len(program.starts):
        ended = [process for process in started if process.poll() not in (None, -signal.SIGKILL)]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
            pytest.fail(f"{program.path.name} did not reach its hang point:\n{logs[-4000:]}")
        time.sleep(0.05)


def _wait_until_still(pids: tuple[int, ...]) -> None:
    """Until the processes use no CPU for a while, or clearly will not stop using it."""
    deadline = time.monotonic() + SETTLE_S
    still_since, before = time.monotonic(), -1.0
    while time.monotonic() < deadline and time.monotonic() - still_since < STILL_S:
        family = [*pids, *descendants(pids, process_table())]
        now = sum(stat.cpu_s for stat in map(read_stat, family) if stat)
        if now > before + 0.02:
            still_since, before = time.monotonic(), now
        time.sleep(0.1)


def _kill_tree(pids: tuple[int, ...]) -> None:
    """SIGKILL, launchers first, so that none restarts or reports what it started."""
    for pid in [*pids, *descendants(pids, process_table())]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture
def hanging(tmp_path):
    """Call with a program's name inside `with`: the program under torchrun, at its hang point."""
    return lambda name: running(under_torchrun(read_program(PROGRAMS / f"{name}.py")), tmp_path / "run")


def under_torchrun(program: Program) -> Program:
    """The same program started by torchrun, unless its fault forbids that."""
    return replace(program, launch="torchrun") if program.launch == "any" else program


def diagnose_program(program: Program, folder: Path) -> Diagnosis:
    """Run a program until it hangs, collect it through the real py-spy, and diagnose the collection."""
    collection = folder / "collection"
    with running(program, folder / "run") as hung:
        collect_host(Search(hung.pids), collection, Options(interval_s=1.0))
    return diagnose(read_snapshot((collection,), None, {}))


@pytest.fixture(scope="session")
def diagnoses(request, tmp_path_factory) -> Iterator[dict[str, Future]]:
    """Program name to its future diagnosis, for every program that this session asks for, two at a time."""
    names = [
        item.callspec.params["program"] for item in request.session.items if "diagnoses" in item.fixturenames
    ]
    pool = ThreadPoolExecutor(PROGRAMS_AT_ONCE)
    yield {
        name: pool.submit(
            diagnose_program, read_program(PROGRAMS / f"{name}.py"), tmp_path_factory.mktemp(name)
        )
        for name in names
    }
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def diagnose_under_torchrun(tmp_path):
    """Call with a program's name: its diagnosis when torchrun has started it."""
    return lambda name: diagnose_program(under_torchrun(read_program(PROGRAMS / f"{name}.py")), tmp_path)
