"""Twenty causes of a slow job on 8 real processes: does `areal-debug hang --slow` name each?

    python benchmarks/slow_ranks.py [--only NAME]... [--seconds 15] [--repeat 1] [--json FILE]

Each case is a tiny DDP job that torchrun starts with gloo on this machine. The work of a step is
mostly sleeps in the calls in which a real job spends its time (dataset, module, backward hook,
checkpoint, request to an engine), so that 8 ranks fit on 2 cores; garbage collection, page faults,
the GIL and the CPU are real. Nothing is installed in the job and it is not changed for the
measurement. The healthy jobs must not be accused. The table of docs/slow_ranks.md is its output.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_core.launch.server_process import free_port
from hangdoctor.collect.discover import Search
from hangdoctor.collect.process import descendants, process_table
from hangdoctor.slow.live import who_is_slow
from hangdoctor.watch.tree import end_all

JOB = Path(__file__).with_name("slow_jobs") / "train.py"
ENGINE = JOB.with_name("engine_server.py")
START_S = 120.0


@dataclass(frozen=True)
class Case:
    """One job. `rank` is the one that is slowed, None where they are late in turn or none is;
    `label` and `cause` are what the verdict must be; `engines` are the speeds of its servers.
    """

    name: str
    label: str
    cause: str
    rank: int | None = None
    ranks: int = 8
    engines: tuple[float, ...] = ()


CASES = (
    Case("dataset", "slow_rank", "input", 3),
    Case("loader_worker", "slow_rank", "input", 2, 4),
    Case("remote_storage", "slow_rank", "input", 6, 7, (1.0,)),
    Case("copy_to_device", "slow_rank", "h2d", 5),
    Case("forward", "slow_rank", "forward", 1),
    Case("backward_hook", "slow_rank", "backward", 4),
    Case("slow_device", "slow_rank", "compute", 7),
    Case("collect_garbage", "slow_rank", "gc", 2),
    Case("automatic_garbage", "slow_rank", "gc", 6),
    Case("garbage_in_turn", "late_in_turn", "gc"),
    Case("checkpoint", "slow_rank", "checkpoint", 0),
    Case("page_faults", "slow_rank", "swap", 3),
    Case("optimizer", "slow_rank", "optimizer", 5),
    Case("reward", "slow_rank", "reward", 1),
    Case("slow_engine", "slow_engine", "rollout", None, 6, (1.0, 4.0)),
    Case("long_prompt", "long_prompt", "rollout", 4, 6, (1.0, 1.0)),
    Case("long_prompts_in_turn", "long_prompt", "rollout", None, 6, (1.0, 1.0)),
    Case("evaluation", "slow_rank", "evaluation", 0),
    Case("stopped", "slow_rank", "stopped", 4),
    Case("gil", "slow_rank", "gil", 7),
    Case("healthy", "no_rank_is_slow", ""),
    Case("healthy_uneven", "no_rank_is_slow", ""),
    Case("healthy_input_bound", "no_rank_is_slow", ""),
    Case("healthy_communication", "no_rank_is_slow", ""),
    Case("healthy_rollouts", "no_rank_is_slow", "", None, 6, (1.0, 1.0)),
)


@dataclass(frozen=True)
class Result:
    """What was found for one case, in how many seconds."""

    name: str
    expected: str
    found: str
    right: bool
    seconds: float
    summary: str
    verdict: dict[str, object]


@contextmanager
def running(case: Case, folder: Path) -> Iterator[int]:
    """Start the job of a case, yield the pid of its launcher after its first steps, end it."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(JOB.parents[2]),
        "SLOW_FOLDER": str(folder),
    }
    servers = [start_engine(factor, folder) for factor in case.engines]
    environment["SLOW_ENGINES"] = ",".join(str(port) for _, port in servers)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={case.ranks}", str(JOB), case.name, str(case.rank)]
    with (folder / "job.log").open("w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while len(list(folder.glob("ready-*"))) < case.ranks:
            if job.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{case.name} did not start:\n{(folder / 'job.log').read_text()[-3000:]}")
            time.sleep(0.2)
        yield job.pid
    finally:
        end_all([job.pid, *descendants([job.pid], process_table())])
        job.wait()
        for server, _ in servers:
            server.kill()
            server.wait()


def start_engine(factor: float, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server whose tokens take `factor` times the usual time; return it and its port."""
    port = free_port()
    command = [sys.executable, str(ENGINE), str(port), str(factor)]
    with (folder / f"engine-{port}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log), port


def examine(case: Case, seconds: float) -> Result:
    """Run one case and compare the verdict with what is expected."""
    with tempfile.TemporaryDirectory() as scratch, running(case, Path(scratch)) as launcher:
        begin = time.monotonic()
        verdict = who_is_slow(Search((launcher,)), seconds)
        took = time.monotonic() - begin
    expected_ranks = () if case.rank is None or case.label != "slow_rank" else (case.rank,)
    right = verdict.label == case.label and verdict.cause == case.cause
    right = right and (case.label != "slow_rank" or verdict.culprit_ranks == expected_ranks)
    found = f"{verdict.label} {verdict.cause} {','.join(map(str, verdict.culprit_ranks))}".strip()
    expected = f"{case.label} {case.cause} {'' if case.rank is None else case.rank}".strip()
    return Result(case.name, expected, found, right, took, verdict.summary, verdict.as_json())


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for case in [c for c in CASES if not options.only or c.name in options.only] * options.repeat:
        result = examine(case, options.seconds)
        results.append(result)
        print(
            f"{'ok ' if result.right else 'NO '} {case.name:22} {result.seconds:5.1f} s  {result.summary}",
            flush=True,
        )
    right = sum(result.right for result in results)
    print(f"{right} of {len(results)} right, {max(r.seconds for r in results):.1f} s at most")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
