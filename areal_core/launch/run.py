"""A run on the scheduler that the config names, started again after a failure where `recover` asks for it.

`recover.mode`   at the launcher's first start          after a failure
disabled, off    from the beginning                     ends
fault            from the beginning                     starts again, from the newest whole checkpoint
auto, on         from the newest checkpoint, if any     starts again, from the newest whole checkpoint
resume           from the newest checkpoint, or ends    ends

A run that succeeded is never started again, nor one that ended with code 2: what a user has to mend stays as it is.
"""

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from areal_core.errors import ConfigError
from areal_core.launch.job import Job
from areal_core.launch.torchrun import ended_on_signals

RECOVER_RUN = "AREAL_RECOVER_RUN"  # "1" in the ranks of a run that was started again
RESTARTING_MODES = ("fault", "auto", "on")
MAX_DELAY_S = 60.0
MISUSE = 2


def run(make_job: Callable[[int], Job]) -> int:
    """Runs `make_job(0)` and, after failures, `make_job(1)` up to `make_job(recover.retries)`.

    The logs of attempt i are kept in `attempt-{i}` below the log folder once a later attempt begins.

    Returns:
        The exit code of the last attempt.
    """
    first = make_job(0)
    recover = first.config.recover
    retries = recover.retries if recover.mode in RESTARTING_MODES else 0
    with ended_on_signals():
        for attempt in range(retries + 1):
            job = make_job(attempt) if attempt else first
            code = launch(replace(job, env={RECOVER_RUN: str(min(attempt, 1)), **job.env}))
            if code in (0, MISUSE) or attempt == retries:
                return code
            delay_s = min(2.0**attempt, MAX_DELAY_S)  # what made it fail, a network or a full disk, may pass
            told = f"ended with exit code {code}; starting again in {delay_s:.0f} s, {attempt + 1} of at most {retries} times"
            print(told, file=sys.stderr, flush=True)
            keep_logs(job.log_dir, attempt)
            time.sleep(delay_s)
    raise AssertionError("the last attempt returns")


def launch(job: Job) -> int:
    """One attempt, on the scheduler that `scheduler.type` names; the exit code of the first rank that failed.

    Raises:
        ConfigError: that scheduler cannot be used from here, or cannot place the job.
    """
    if job.config.scheduler.type == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "scheduler.type is 'ray' and Ray is not installed: pip install 'areal-debug[ray]'"
            )
        from areal_core.launch import ray_cluster

        return ray_cluster.launch(job)
    if job.config.scheduler.type == "slurm":
        from areal_core.launch import slurm

        return slurm.launch(job)
    from areal_core.launch import local

    return local.launch(job)


def keep_logs(log_dir: Path, attempt: int) -> None:
    """Moves what a failed attempt has logged out of the way of the next one."""
    kept = log_dir / f"attempt-{attempt}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for entry in (*log_dir.glob("*.log"), log_dir / "ranks"):
        if entry.exists():
            entry.rename(kept / entry.name)
