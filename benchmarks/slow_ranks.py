"""Twenty causes of a slow job on 8 real processes: does `areal-debug hang --slow` name each?

    python -m benchmarks.slow_ranks [--only NAME ...] [--seconds 15] [--json FILE]

Each case is a cause in a tiny DDP job that torchrun starts with gloo on this machine. The work of a
step is mostly sleeps in the calls in which a real job spends its time (dataset, module, backward
hook, checkpoint, request to an engine), so that 8 ranks fit on 2 cores; garbage collection, page
faults, stops and the GIL are real. Nothing is installed in the job. The healthy jobs must not be
accused. The table of docs/verbs/trace.md is made of its output.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_core.launch.server_process import free_port
from benchmarks.harness import SomeOf, read_options
from hangdoctor.collect.discover import Search
from hangdoctor.collect.process import descendants, process_table
from hangdoctor.slow.live import who_is_slow
from hangdoctor.watch.loop import end_all, lives

JOB = Path(__file__).with_name("slow_jobs") / "train.py"
ENGINE = JOB.with_name("engine_server.py")
START_S = 120.0


@dataclass(frozen=True)
class Topology:
    """The processes of a job: 8 in all."""

    ranks: int
    loader_workers: int = 0
    engines: int = 0


RANKS = Topology(8)
LOADERS = Topology(4, loader_workers=1)
ENGINES = Topology(6, engines=2)


@dataclass(frozen=True)
class Case:
    """One cause. `rank` is the one that is slowed, -1 where they are late in turn or none is.

    `label` and `cause` are what the verdict must be, with `rank` as culprit for slow_rank;
    `factor` is how much longer engine 1 takes for a token.
    """

    name: str
    label: str
    cause: str
    rank: int = -1
    topology: Topology = RANKS
    factor: float = 1.0


CASES = (
    Case("dataset", "slow_rank", "input", 3),
    Case("copy_to_device", "slow_rank", "h2d", 5),
    Case("forward", "slow_rank", "forward", 1),
    Case("backward_hook", "slow_rank", "backward", 4),
    Case("slow_device", "slow_rank", "compute", 7),
    Case("optimizer", "slow_rank", "optimizer", 5),
    Case("checkpoint", "slow_rank", "checkpoint", 0),
    Case("evaluation", "slow_rank", "evaluation", 0),
    Case("reward", "slow_rank", "reward", 1),
    Case("collect_garbage", "slow_rank", "gc", 2),
    Case("automatic_garbage", "slow_rank", "gc", 6),
    Case("garbage_in_turn", "late_in_turn", "gc"),
    Case("page_faults", "slow_rank", "swap", 3),
    Case("stopped", "slow_rank", "stopped", 4),
    Case("gil", "slow_rank", "gil", 7),
    Case("healthy", "no_rank_is_slow", ""),
    Case("healthy_uneven", "no_rank_is_slow", ""),
    Case("healthy_input_bound", "no_rank_is_slow", ""),
    Case("healthy_communication", "no_rank_is_slow", ""),
    Case("loader_worker", "slow_rank", "input", 2, LOADERS),
    Case("healthy_loaders", "no_rank_is_slow", "", -1, LOADERS),
    Case("remote_storage", "slow_rank", "input", 2, ENGINES),
    Case("slow_engine", "slow_engine", "rollout", -1, ENGINES, 4.0),
    Case("long_prompt", "long_prompt", "rollout", 4, ENGINES),
    Case("long_prompts_in_turn", "long_prompt", "rollout", -1, ENGINES),
    Case("healthy_rollouts", "no_rank_is_slow", "", -1, ENGINES),
)


@dataclass(frozen=True)
class Result:
    """What was found for one case, in how many seconds."""

    name: str
    right: bool
    seconds: float
    summary: str
    verdict: dict[str, object]


@contextmanager
def running(topology: Topology, folder: Path) -> Iterator[int]:
    """Start a job of this form, yield the pid of its launcher, end it."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(JOB.parents[2]),
        "SLOW_FOLDER": str(folder),
        "SLOW_WORKERS": str(topology.loader_workers),
    }
    servers = [start_engine(folder / f"factor-{i}") for i in range(topology.engines)]
    environment["SLOW_ENGINES"] = ",".join(str(port) for _, port in servers)
    command = ["nice", "-n", "5", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={topology.ranks}", str(JOB)]
    with (folder / "job.log").open("w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield job.pid
    finally:
        end_all([job.pid, *descendants([job.pid], process_table())])
        job.wait()
        for server, _ in servers:
            server.kill()
            server.wait()


def start_engine(factor: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server whose tokens take as much longer as a file says; return it and its port."""
    port = free_port()
    return subprocess.Popen([sys.executable, str(ENGINE), str(port), str(factor)]), port


def choose(case: Case, folder: Path) -> None:
    """Make this case the cause of the next steps of the job."""
    for engine in range(case.topology.engines):
        (folder / f"factor-{engine}").write_text(str(case.factor if engine == 1 else 1.0))
    (folder / "next").write_text(f"{case.name} {case.rank}")
    (folder / "next").replace(folder / "cause")


def wait_until_ready(case: Case, folder: Path, launcher: int) -> None:
    """Wait until every rank has made two steps of a case.

    Raises:
        RuntimeError: the job has ended, or does not get there in START_S.
    """
    deadline = time.monotonic() + START_S
    while len(list(folder.glob(f"ready-{case.name}-*"))) < case.topology.ranks:
        if not lives(launcher) or time.monotonic() > deadline:
            raise RuntimeError(f"{case.name} did not start:\n{(folder / 'job.log').read_text()[-3000:]}")
        time.sleep(0.2)


def examine(case: Case, launcher: int, seconds: float) -> Result:
    """Compare the verdict about the running job with what is expected."""
    begin = time.monotonic()
    verdict = who_is_slow(Search((launcher,)), seconds)
    took = time.monotonic() - begin
    right = (verdict.label, verdict.cause) == (case.label, case.cause)
    if case.label == "slow_rank":
        right = right and verdict.culprit_ranks == (case.rank,)
    return Result(case.name, right, took, verdict.summary, verdict.as_json())


def examine_all(cases: Sequence[Case], seconds: float) -> Iterator[Result]:
    """Yield the results of cases of the same topology, from one job."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        choose(cases[0], folder)
        with running(cases[0].topology, folder) as launcher:
            for case in cases:
                choose(case, folder)
                wait_until_ready(case, folder, launcher)
                yield examine(case, launcher, seconds)


def main() -> None:
    options = read_options(__doc__, only=SomeOf(case.name for case in CASES), seconds=15.0, json="")
    chosen = [case for case in CASES if case.name in options.only]
    results = []
    for topology in dict.fromkeys(case.topology for case in chosen):
        for result in examine_all([case for case in chosen if case.topology == topology], options.seconds):
            results.append(result)
            mark = "ok" if result.right else "NO"
            print(f"{mark} {result.name:22} {result.seconds:5.1f} s  {result.summary}", flush=True)
    right = sum(result.right for result in results)
    print(f"{right} of {len(results)} right, {max(r.seconds for r in results):.1f} s at most")
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
