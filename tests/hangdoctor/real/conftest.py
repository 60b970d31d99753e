"""Start a fault program for real, wait until it hangs, collect it, and end every process of it.

A program defines the expected result in its docstring (`label`, `culprits`, `ranks`, `starts`,
`launch`, `computes`). Its ranks are forks (`tests/forks.py`), several programs at a time; torchrun starts
them to break the network, and for a test of the command.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_core.launch.server_process import free_port
from hangdoctor.collect.discover import Search
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.process import descendants, process_table, read_stat
from hangdoctor.collect.pyspy import Options
from hangdoctor.diagnose import diagnose
from hangdoctor.model import Diagnosis
from hangdoctor.parse.read import read_snapshot
from tests.forks import ForkedProgram

PROGRAMS = Path(__file__).parents[1] / "programs"
PROGRAMS_AT_ONCE = 4
EVERYWHERE = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
REACH_HANG_POINT_S = 120
STILL_S = 0.5
SETTLE_S = 6


@dataclass(frozen=True)
class Program:
    """The fields in the docstring of a fault program."""

    path: Path
    label: str
    culprits: tuple[int, ...]
    num_ranks: int
    starts: tuple[int, ...]
    launch: str
    computes: bool


def read_program(name: str) -> Program:
    """Return the program of that name, as its docstring describes it."""
    path = PROGRAMS / f"{name}.py"
    fields = dict(re.findall(r"^(\w+): (.+)$", path.read_text(), re.MULTILINE))
    num_ranks = int(fields["ranks"])
    return Program(
        path,
        fields["label"],
        tuple(int(rank) for rank in re.findall(r"\d+", fields.get("culprits", ""))),
        num_ranks,
        tuple(int(rank) for rank in fields.get("starts", " ".join(map(str, range(num_ranks)))).split()),
        fields.get("launch", "any"),
        "computes" in fields,
    )


def start_forks(program: Program, folder: Path) -> list[ForkedProgram]:
    port = str(free_port())
    job = {"WORLD_SIZE": str(program.num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job |= EVERYWHERE | {"HANG_POINT_DIR": str(folder / "markers")}
    return [
        ForkedProgram(
            [str(program.path)],
            folder,
            {"RANK": str(rank), "LOCAL_RANK": str(rank), **job},
            folder / f"{rank}.log",
        )
        for rank in program.starts
    ]


def start_torchrun(program: Program, folder: Path) -> subprocess.Popen:
    """The program under torchrun, in its own network namespace when it breaks the network."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={program.num_ranks}"]
    command = [sys.executable, *torchrun, str(program.path)]
    if program.launch == "network_namespace":
        if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
            pytest.skip("taking the network away needs a network namespace, and this user may not make one")
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    environment = os.environ | EVERYWHERE | {"HANG_POINT_DIR": str(folder / "markers")}
    with (folder / "torchrun.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)


@contextmanager
def running(program: Program, folder: Path, in_forks: bool) -> Iterator[tuple[int, ...]]:
    """Yield the pids of the ranks at the hang point; kill all afterwards.

    Those that are no forks are started by torchrun, whose pid is yielded.
    """
    (folder / "markers").mkdir(parents=True)
    launcher, forks = None, []
    if not in_forks or program.launch == "network_namespace":
        launcher = start_torchrun(program, folder)
    else:
        forks = start_forks(program, folder)
    pids = (launcher.pid,) if launcher else tuple(fork.process_id for fork in forks)
    try:
        _wait_for_markers(program, pids, folder)
        _wait_until_still(pids, STILL_S if program.computes else SETTLE_S)
        yield pids
    finally:
        _kill_tree(pids)
        for fork in forks:
            fork.kill()
        if launcher:
            launcher.wait()
            launcher.stdin.close()


def _wait_for_markers(program: Program, pids: tuple[int, ...], folder: Path) -> None:
    deadline = time.monotonic() + REACH_HANG_POINT_S
    while True:
        # Read before the markers: a rank may set its marker and die before its peers set theirs.
        stats = dict(zip(program.starts, map(read_stat, pids), strict=False))  # of torchrun: only its own
        reached = {path.name for path in (folder / "markers").iterdir()}
        if len(reached) == len(program.starts):
            return
        dead = [rank for rank, stat in stats.items() if stat is None or stat.state == "Z"]
        if time.monotonic() > deadline or any(f"rank_{rank}" not in reached for rank in dead):
            logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
            pytest.fail(f"{program.path.name} did not reach its hang point:\n{logs[-4000:]}")
        time.sleep(0.05)


def _wait_until_still(pids: tuple[int, ...], most_s: float) -> None:
    """Wait until the processes use no CPU for a while, or clearly will not stop using it."""
    deadline = time.monotonic() + most_s
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


def diagnose_program(program: Program, folder: Path) -> Diagnosis:
    """Run a program until it hangs, collect it with the real py-spy, diagnose the collection."""
    with running(program, folder / "run", in_forks=True) as pids:
        collect_host(Search(pids), folder / "collection", Options(interval_s=1.0))
    return diagnose(read_snapshot([folder / "collection"]))


@pytest.fixture
def hanging(tmp_path):
    """Context manager: run a program under torchrun to its hang point; yields the pids."""
    return lambda name: running(read_program(name), tmp_path / "run", in_forks=False)


@pytest.fixture(scope="session")
def diagnoses(request, tmp_path_factory) -> Iterator[dict[str, Future]]:
    """Map test id to future diagnosis, for the program tests of this session, several at a time."""
    items = [item for item in request.session.items if "diagnoses" in item.fixturenames]
    pool = ThreadPoolExecutor(PROGRAMS_AT_ONCE)
    yield {
        item.nodeid: pool.submit(
            diagnose_program,
            read_program(item.callspec.params["program"]),
            tmp_path_factory.mktemp(item.callspec.params["program"]),
        )
        for item in items
    }
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def diagnosis(request, diagnoses) -> Diagnosis:
    return diagnoses[request.node.nodeid].result()
