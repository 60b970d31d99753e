"""Kill a run at random moments, let it continue, and compare its end bit for bit with a reference.

    python -m benchmarks.kill_and_resume [--method grpo] [--ranks 2] [--kills 20] [--seed 1]
                                         [--victims all] [--mode async]

The reference is the same run, undisturbed. Moments are uniform over the time that it trains, so
they also hit the writing of checkpoints, one per step. Every other run is killed a second time, at
a moment of all the time that it needs to start and train again. `--victims` all or one: ranks,
which the launcher restarts; job: the launcher, too, which is then started again with the same
command. Compared are the checksums of all weights and optimizer states after the last step,
schedules, random states, and the position in the data. Exit code 0: all are equal.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import yaml

from areal_core.testing import make_tiny_model
from benchmarks.harness import read_options

PROGRAM = Path(__file__).parent / "killed_run.py"
OPTIMIZER = {"lr": 1.0e-3, "warmup_steps_proportion": 0.0, "lr_scheduler_type": "linear"}
TIMEOUT_S = 600.0
POLL_S = 0.02
MOST_MISSES = 20


@dataclass(frozen=True)
class Plan:
    """The run, and how it is killed."""

    method: str
    ranks: int
    steps: int
    mode: str
    victims: str


@dataclass(frozen=True)
class Kill:
    """The moment of a kill.

    Args:
        after_s: seconds since training started; of the second kill, since the first.
        steps_done: lines of statistics at that moment.
        was_writing: whether a checkpoint was being written.
    """

    after_s: float
    steps_done: int
    was_writing: bool


@dataclass(frozen=True)
class Undisturbed:
    """The undisturbed run: seconds until training started, seconds in total, and its result."""

    start_s: float
    duration_s: float
    result: dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One run that was killed, once or twice."""

    kills: list[Kill]
    is_identical: bool


def config_of(plan: Plan, model: Path) -> dict[str, Any]:
    """Return the options of a run of tiny models that checkpoints every step."""
    engine = {"path": str(model), "dtype": "float32", "optimizer": OPTIMIZER}
    common: dict[str, Any] = {
        "experiment_name": "killed",
        "trial_name": plan.method,
        "device": "cpu",
        "deterministic": True,
        "total_train_epochs": plan.steps,
        "total_train_steps": plan.steps,
        "allocation_mode": f"embedded|fsdp:d{plan.ranks}",
        "recover": {"mode": "auto", "freq_steps": 1},
        "saver": {"mode": plan.mode},
        "train_dataset": {"path": "arithmetic", "type": "rl", "batch_size": 4, "dataset_kwargs": {"num_rows": 64}},
    }  # fmt: skip
    if plan.method == "sft":
        dataset = {"path": "in the program", "type": "sft", "batch_size": 4}
        return common | {"allocation_mode": f"fsdp:d{plan.ranks}", "train_dataset": dataset, "actor": engine}
    actor = engine | {"ppo_n_minibatches": 2, "kl_ctl": 0.0, "mb_spec": {"max_tokens_per_mb": 64}}
    actor |= {"use_decoupled_loss": True, "adv_norm": {"mean_level": "batch", "std_level": "batch"}}
    if plan.method == "grpo":
        actor["reward_norm"] = {"mean_level": "group", "std_level": "group", "group_size": 4}
    if plan.method == "ppo":
        common["critic"] = engine | {"ppo_n_minibatches": 2}
    ahead = 2 if plan.method == "async" else 0
    rollout = {"consumer_batch_size": 4, "max_head_offpolicyness": ahead}
    sampling = {"n_samples": 4, "max_new_tokens": 8}
    return common | {"actor": actor, "gconfig": sampling, "rollout": rollout}


class Job:
    """A launcher and its ranks, whose files are in `folder`."""

    def __init__(self, plan: Plan, config: Path, folder: Path, **environment: str) -> None:
        self.plan, self.folder = plan, folder
        launcher = Path(sys.executable).parent / "areal-debug"
        options = (f"cluster.fileroot={folder}",)
        self.command = [str(launcher), "train", str(PROGRAM), "--config", str(config), *options]
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "METHOD": plan.method} | environment
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self.started_s = time.monotonic()
        with open(self.folder / "output.txt", "a") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=self.environment, start_new_session=True
            )

    def wait(self) -> float:
        """Wait for its end; return its seconds. Raise RuntimeError if it failed."""
        if self.process.wait(TIMEOUT_S) != 0:
            raise RuntimeError(f"the run failed:\n{(self.folder / 'output.txt').read_text()[-4000:]}")
        return time.monotonic() - self.started_s

    def wait_for_training(self) -> float:
        """Wait until the training loop starts; return the seconds that took."""
        while self.process.poll() is None and not [*self.folder.glob("logs/*/killed/*/config.json")]:
            time.sleep(POLL_S)
        return time.monotonic() - self.started_s

    def kill(self, after_s: float, choose: random.Random) -> Kill | None:
        """Kill the victims in `after_s` seconds; return None if no rank runs then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(after_s)
            return None
        launcher = psutil.Process(self.process.pid)
        tree = [launcher, *launcher.children(recursive=True)]
        ranks = [process for process in tree if is_rank(process)]
        if not ranks:
            return None
        victims = {"all": ranks, "one": [choose.choice(ranks)], "job": tree}[self.plan.victims]
        end(victims)
        psutil.wait_procs(victims if self.plan.victims != "job" else tree[1:])
        found = Kill(after_s, self.steps_done(), any(self.checkpoints.glob("*.partial")))
        if self.plan.victims == "job":
            self.process.wait()
            self.start()
        return found

    @property
    def checkpoints(self) -> Path:
        return next(self.folder.glob("checkpoints/*/killed/*/recover"), self.folder / "none")

    def steps_done(self) -> int:
        [*files] = self.folder.glob("logs/*/killed/*/stats.jsonl")
        return len(files[0].read_text().splitlines()) if files else 0

    def result(self) -> dict[str, Any]:
        """Return the content of the last checkpoint, without times."""
        file = self.checkpoints / f"step-{self.plan.steps:06d}" / "checkpoint.json"
        content = json.loads(file.read_text())["content"]
        del content["state"]["timers"]
        return content


def is_rank(process: psutil.Process) -> bool:
    """Return whether a process is one of the ranks, and not one that they started."""
    try:
        parent = process.parent()
        return runs_program(process) and (parent is None or not runs_program(parent))
    except psutil.Error:
        return False


def runs_program(process: psutil.Process) -> bool:
    """Return whether a process runs the program, and is not a launcher with it as an argument."""
    arguments = process.cmdline()
    return "areal_debug.train.script" in arguments and "areal_core.launch.node" not in arguments


def end(processes: list[psutil.Process]) -> None:
    """Kill processes at one moment: none of them sees another one end."""
    for kill in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                kill(process)


def try_once(job: Job, times: list[float], choose: random.Random, expected: dict[str, Any]) -> Trial | None:
    """Start a run, kill it at a random moment of each of `times`, let it end; None if none hit."""
    job.start()
    job.wait_for_training()
    kills = [job.kill(choose.uniform(0.0, time_s), choose) for time_s in times]
    job.wait()
    hit = [kill for kill in kills if kill is not None]
    return Trial(hit, job.result() == expected) if hit else None


def killed_runs(
    plan: Plan, config: Path, folder: Path, reference: Undisturbed, choose: random.Random
) -> Iterator[Trial]:
    """Yield runs in which a kill hit a rank. Raise RuntimeError when none does any more."""
    misses = hits = 0
    while misses < MOST_MISSES:
        job = Job(plan, config, folder)
        times = [reference.duration_s - reference.start_s, reference.duration_s][: 1 + hits % 2]
        trial = try_once(job, times, choose, reference.result)
        shutil.rmtree(job.folder)
        misses = 0 if trial is not None else misses + 1
        if trial is not None:
            hits += 1
            yield trial
    raise RuntimeError(
        f"{misses} runs in a row ended before they were killed: give them more steps (--steps)"
    )


def main() -> int:
    options = read_options(
        __doc__,
        method=("grpo", "ppo", "async", "sft"),
        ranks=2,
        steps=16,
        kills=20,
        seed=1,
        victims=("all", "one", "job"),
        mode=("sync", "async"),
        json=False,
    )
    plan = Plan(options.method, options.ranks, options.steps, options.mode, options.victims)
    choose, trials = random.Random(options.seed), list[Trial]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(config_of(plan, make_tiny_model(folder / "model"))))
        undisturbed = Job(plan, config, folder / "undisturbed")
        undisturbed.start()
        start_s = undisturbed.wait_for_training()
        reference = Undisturbed(start_s, undisturbed.wait(), undisturbed.result())
        if not options.json:
            print(f"undisturbed: {reference.duration_s:.1f} s, of which {start_s:.1f} s to start", flush=True)
        runs = killed_runs(plan, config, folder / "killed", reference, choose)
        for trial in islice(runs, options.kills):
            trials.append(trial)
            if not options.json:
                print(describe(len(trials), trial), flush=True)
    num_identical = sum(trial.is_identical for trial in trials)
    if options.json:
        print(json.dumps({**asdict(plan), "trials": [asdict(trial) for trial in trials]}, indent=1))
    else:
        print(f"{num_identical} of {len(trials)} killed runs ended with the same bits")
    return 0 if num_identical == len(trials) else 1


def describe(number: int, trial: Trial) -> str:
    moments = [
        f"after {kill.after_s:.1f} s with {kill.steps_done} steps done"
        + ", while a checkpoint was written" * kill.was_writing
        for kill in trial.kills
    ]
    return f"{number:3}  killed {', and '.join(moments)}: {'the same bits' if trial.is_identical else 'DIFFERENT BITS'}"


if __name__ == "__main__":
    sys.exit(main())
