"""Run a job on the configured scheduler, and restart it after a failure if `recover` requires it.

`recover.mode`   at the launcher's first start          after a failure
disabled, off    from the beginning                     ends
fault            from the beginning                     restarts from the newest complete checkpoint
auto, on         from the newest checkpoint, if any     restarts from the newest complete checkpoint
resume           from the newest checkpoint, or ends    ends

A run that succeeded is never restarted, nor one that ended with code 2, which the user has to fix.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from areal_core.errors import ConfigError
from areal_core.launch.job import MISUSE, Job
from areal_core.launch.torchrun import ended_on_signals
from areal_core.safety.lock import RUN_ID, Held, run_id, take

RECOVER_RUN = "AREAL_RECOVER_RUN"  # "1" in the ranks of a restarted run
RESTARTING_MODES = ("fault", "auto", "on")
MAX_DELAY_S = 60.0
HOOK_S = 600.0  # of `post_exit_hook`
LOCK = "run.lock"  # in the folder of the run's logs


def run(make_job: Callable[[int], Job]) -> int:
    """Run `make_job(0)` and, after failures, `make_job(1)` up to `make_job(recover.retries)`.

    The logs of attempt i are moved to `attempt-{i}` below the log folder when a later attempt
    starts.

    Returns:
        The exit code of the last attempt.

    Raises:
        ConfigError: another run of this name is running.
        ModuleNotFoundError: the ranks could not import what they train with.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError(name="transformers")
    first = make_job(0)
    recover = first.config.recover
    retries = recover.retries if recover.mode in RESTARTING_MODES else 0
    with ended_on_signals(), only_run_of_its_name(first) as run, post_exit_hook(first):
        for attempt in range(retries + 1):
            job = make_job(attempt) if attempt else first
            code = launch(replace(job, env={RECOVER_RUN: str(min(attempt, 1)), RUN_ID: run, **job.env}))
            if code in (0, MISUSE) or attempt == retries:
                return code
            delay_s = min(2.0**attempt, MAX_DELAY_S)  # the cause may be temporary
            message = f"ended with exit code {code}; restarting in {delay_s:.0f} s, restart {attempt + 1} of at most {retries}"
            print(message, file=sys.stderr, flush=True)
            keep_logs(job.log_dir, attempt)
            time.sleep(delay_s)
    raise AssertionError("the last attempt returns")


@contextmanager
def post_exit_hook(job: Job) -> Iterator[None]:
    """Run `post_exit_hook` after the block; a failure is printed, and changes no exit code."""
    try:
        yield
    finally:
        if command := job.config.post_exit_hook.strip():
            env = os.environ | {"LOG_DIR": str(job.log_dir)}
            try:
                code = subprocess.run(command, shell=True, timeout=HOOK_S, env=env, check=False).returncode
                failure = f"ended with exit code {code}" if code else ""
            except (OSError, subprocess.TimeoutExpired) as error:
                failure = str(error)
            if failure:
                print(f"post_exit_hook: {failure}", file=sys.stderr, flush=True)


@contextmanager
def only_run_of_its_name(job: Job) -> Iterator[str]:
    """Lock the folder of the run's logs inside the block, and return the id of the run.

    The lock stands for all folders of that experiment and trial: checkpoints and statistics, too.
    """
    name = f"{job.config.experiment_name}/{job.config.trial_name}"
    run = run_id()
    job.log_dir.mkdir(parents=True, exist_ok=True)
    try:
        lock = take(job.log_dir / LOCK, run, name)
    except Held as holder:
        raise ConfigError(
            f"{job.log_dir} belongs to a run that has not ended, {holder}: give another trial_name (it is "
            f"{job.config.trial_name!r})"
        ) from None
    try:
        yield run
    finally:
        lock.release()


def launch(job: Job) -> int:
    """Run one attempt on the scheduler of `scheduler.type`; return its exit code (see `run_job`).

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
    kept = log_dir / f"attempt-{attempt}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    # deterministic: renames every file
    for entry in (*log_dir.glob("*.log"), log_dir / "ranks"):
        if entry.exists():
            entry.rename(kept / entry.name)
