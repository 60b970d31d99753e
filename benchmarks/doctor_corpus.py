"""How often `areal-debug doctor` names a failure that was really trained, and accuses a sound run.

    python -m benchmarks.doctor_corpus --keep FOLDER [--seeds 3] [--healthy-seeds 5] [--jobs 1]
                                       [--only TEXT] [--no-training] [--json FILE]

Each failure of benchmarks/doctor_plants/failures.yaml is trained by a tiny model on the task of
benchmarks/larger_numbers.py, once a seed, and so is each sound run of healthy.yaml. Runs are kept
and not trained again. Then the doctor reads the statistics of each: a failure is found if an alarm
of one of its rules is given; the delay is from the step at which the fault began (0 for options) to
the shortest log, in steps of `STRIDE`, that is enough. A sound run with any alarm is accused; one
that did not learn by its own held-out measure (`has_learned`) is not sound, and counted apart.

Exits with 1 if fewer than 90 % of the failures are found, or a sound run is accused.
"""

import json
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from areal_core.config import DPOConfig, PPOConfig, RWConfig, SFTConfig, load_expr_config
from areal_core.paths import run_folder
from areal_core.trainer.dpo import DPOTrainer
from areal_core.trainer.reward_model import RWTrainer
from areal_core.trainer.rl import PPOTrainer
from areal_core.trainer.sft import SFTTrainer
from areal_debug.doctor.examine import examine
from areal_debug.doctor.read import read_run
from benchmarks import larger_numbers as larger
from benchmarks.doctor_plants import changes, rewards
from benchmarks.harness import read_options
from benchmarks.learning_methods import (
    DPO,
    GRPO,
    HELD_OUT,
    PPO,
    REWARD_MODEL,
    SFT,
    TRAINING,
    examples,
    pairs,
    teach,
)
from benchmarks.why_plants.warm import in_a_fork, wait_for

HERE = Path(__file__).parent / "doctor_plants"
DEMO = Path(larger.__file__).parent  # with the configs of the methods
METHODS = {"grpo": GRPO, "ppo": PPO, "sft": SFT, "dpo": DPO, "reward_model": REWARD_MODEL}
SMALLER = ("train_dataset.batch_size=16", "rollout.consumer_batch_size=16", "evaluator.freq_steps=4")
STEPS = {"grpo": 50, "ppo": 50, "sft": 80, "dpo": 64, "reward_model": 64}
HELD_OUT_LOSSES = ("eval-sft/loss/avg", "eval-dpo/loss/avg", "eval-rw/loss/avg")
FEWEST_FOUND, STRIDE = 0.90, 2


@dataclass(frozen=True)
class Plant:
    """A run to train.

    Args:
        expect: ids of the rules that name the failure; none for a sound run.
        change: function of changes.py, which makes the fault.
        rows: number of training rows; all by default.
        labels: "random" exchanges chosen and rejected by chance.
    """

    name: str
    expect: tuple[str, ...] = ()
    method: str = "grpo"
    options: tuple[str, ...] = ()
    reward: str = "right"
    change: str | None = None
    rows: int | None = None
    steps: int | None = None
    labels: str | None = None

    @property
    def onset(self) -> int:
        """The step at which the fault begins."""
        begins = {"stale_engine": 20, "wrong_resume": 28, "broken_weight": 25, "learning_rate_jumps": 20}
        return begins.get(self.change or "", 25 if self.reward in ("smaller", "often_fails") else 0)


def read_plants(name: str) -> list[Plant]:
    return [
        Plant(**{key: tuple(value) if isinstance(value, list) else value for key, value in item.items()})
        for item in yaml.safe_load((HERE / f"{name}.yaml").read_text())
    ]


def train(plant: Plant, folder: Path, models: Path, seed: int) -> None:
    """Train one run in this process, which is not to be used again."""
    torch.set_num_threads(1)
    random.seed(seed)
    method = METHODS[plant.method]
    is_rl = plant.method in ("grpo", "ppo")
    file, kind = (
        ("larger_rl.yaml", PPOConfig) if is_rl else ("larger_supervised.yaml", KINDS[plant.method][0])
    )
    places = {"MODEL": str(models / "taught"), "UNTRAINED": str(models / "untrained")}
    path = places["MODEL" if method.is_taught else "UNTRAINED"]
    given = [
        option.replace("UNTRAINED", places["UNTRAINED"]).replace("MODEL", path) for option in plant.options
    ]
    steps = plant.steps or STEPS[plant.method]
    options = [f"cluster.fileroot={folder}", f"actor.path={path}", f"seed={seed}", f"trial_name={plant.name}"]
    options += [f"total_train_steps={steps}", *method.options, *(SMALLER if is_rl else ()), *given]
    config, _ = load_expr_config(["--config", str(DEMO / file), *options], kind)
    training = TRAINING[: plant.rows]
    if plant.labels == "random":
        training = [
            row | {"chosen": row["rejected"], "rejected": row["chosen"]} if random.random() < 0.5 else row
            for row in training
        ]
    if is_rl:
        with PPOTrainer(config, training, HELD_OUT[:64], print_steps=False) as trainer:
            if plant.change is not None:
                getattr(changes, plant.change)(trainer)
            trainer.train(
                workflow_kwargs={"reward_fn": getattr(rewards, plant.reward)},
                eval_workflow_kwargs={"reward_fn": rewards.right, "gconfig": config.eval_gconfig},
            )
    else:
        _, trainer_class, rows_of = KINDS[plant.method]
        with trainer_class(config, rows_of(training), rows_of(HELD_OUT)) as trainer:
            trainer.train()
    logs = Path(run_folder(config, "logs"))
    shutil.copy(logs / "config.json", folder / "config.json")
    shutil.copy(logs / "stats.jsonl", folder / "log.jsonl")


KINDS: dict[str, Any] = {
    "sft": (SFTConfig, SFTTrainer, examples),
    "dpo": (DPOConfig, DPOTrainer, pairs),
    "reward_model": (RWConfig, RWTrainer, pairs),
}


def make(wanted: Sequence[tuple[Plant, int]], keep: Path, jobs: int) -> None:
    """Train the runs, each a plant and a seed, that are not there yet."""
    for seed in sorted({seed for _, seed in wanted}):
        models = keep / f"models-{seed}"
        if not (models / "taught").exists():
            shutil.rmtree(models, ignore_errors=True)
            models.mkdir(parents=True)
            if wait_for(in_a_fork(keep / f"teach-{seed}.txt", teach, models, seed)):
                raise SystemExit(f"the model of seed {seed} was not taught: see {keep}/teach-{seed}.txt")
    missing = [run for run in wanted if not is_trained(run_of(keep, *run), run[0])]
    for pid in [in_a_fork(None, make_all, missing[job::jobs], keep) for job in range(jobs)]:
        wait_for(pid)


def make_all(wanted: Sequence[tuple[Plant, int]], keep: Path) -> None:
    """Train runs one after another, each in a process of its own."""
    for plant, seed in wanted:
        folder = run_of(keep, plant, seed)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "plant.json").write_text(json.dumps(asdict(plant)))
        started = time.monotonic()
        code = wait_for(in_a_fork(folder / "output.txt", train, plant, folder, keep / f"models-{seed}", seed))
        failed = "" if code == 0 else f", failed: see {folder}/output.txt"
        print(f"{folder.name}: {time.monotonic() - started:.0f} s{failed}", flush=True)


def is_trained(folder: Path, plant: Plant) -> bool:
    """Return whether a folder has the complete log of a run of this plant."""
    plant_file = folder / "plant.json"
    if not (folder / "log.jsonl").exists() or not plant_file.exists():
        return False
    trained, given = json.loads(plant_file.read_text()), json.loads(json.dumps(asdict(plant)))
    return bool(trained | {"expect": None} == given | {"expect": None})


def run_of(keep: Path, plant: Plant, seed: int) -> Path:
    return keep / f"{plant.name}-{seed}"


def has_learned(folder: Path) -> bool:
    """Return whether a run got better by its held-out rows, or else by its own reward."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for name in (*HELD_OUT_LOSSES, "eval-rollout/reward", "rollout/reward"):
        values = [row[name] for row in rows if row.get(name) is not None]
        if len(values) >= 3:
            last = statistics.median(values[-3:])
            return last < 0.9 * values[0] if name in HELD_OUT_LOSSES else last > values[0] + 0.1
    raise SystemExit(f"{folder} has no measure of what was learned")


@dataclass(frozen=True)
class Judged:
    """What the doctor said of a run; `delay` in steps after the onset."""

    name: str
    seed: int
    alarms: tuple[str, ...]
    titles: tuple[str, ...]
    found: bool
    delay: int | None


def judge(plant: Plant, seed: int, folder: Path, scratch: Path) -> Judged:
    lines = (folder / "log.jsonl").read_text().splitlines()
    scratch.mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", scratch)
    alarms = alarms_of(lines, scratch)
    found = bool({alarm.id for alarm in alarms} & set(plant.expect))
    delay = None
    if found:
        for length in range(max(plant.onset, 8), len(lines) + STRIDE, STRIDE):
            if {alarm.id for alarm in alarms_of(lines[:length], scratch)} & set(plant.expect):
                delay = min(length, len(lines)) - plant.onset
                break
    return Judged(plant.name, seed, tuple(a.id for a in alarms), tuple(a.title for a in alarms), found, delay)


def alarms_of(lines: list[str], scratch: Path) -> tuple[Any, ...]:
    """Return the alarms of the first lines of a log."""
    (scratch / "stats.jsonl").write_text("\n".join(lines) + "\n")
    return examine(read_run(scratch / "stats.jsonl")).alarms


def main() -> None:
    options = read_options(
        __doc__, keep=Path, seeds=3, healthy_seeds=5, jobs=1, only="", no_training=False, json=""
    )
    failures, healthy = (
        [p for p in read_plants(name) if options.only in p.name] for name in ("failures", "healthy")
    )
    keep = options.keep.resolve()
    keep.mkdir(parents=True, exist_ok=True)
    wanted = [(plant, seed) for plant in failures for seed in range(1, options.seeds + 1)]
    wanted += [(plant, seed) for plant in healthy for seed in range(1, options.healthy_seeds + 1)]
    if not options.no_training:
        make(sorted(wanted, key=lambda run: run[1]), keep, options.jobs)
    results = [
        judge(plant, seed, folder, keep / "scratch")
        for plant, seed in wanted
        if is_trained(folder := run_of(keep, plant, seed), plant)
    ]
    names = {plant.name for plant in failures}
    no_use = [r for r in results if r.name not in names and not has_learned(keep / f"{r.name}-{r.seed}")]
    results = [result for result in results if result not in no_use]
    print("did not learn, so not sound:", ", ".join(f"{r.name}, seed {r.seed}" for r in no_use) or "none")
    show(failures, healthy, results)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=1))
    bad = [r for r in results if r.name in names]
    accused = [r for r in results if r.name not in names and r.alarms]
    raise SystemExit(bool(accused) or sum(r.found for r in bad) < FEWEST_FOUND * len(bad))


def show(failures: list[Plant], healthy: list[Plant], results: list[Judged]) -> None:
    """Print a row for each failure, what was missed, and the rates."""
    print("failure                       found  delay  alarms")
    for plant in failures:
        mine = [result for result in results if result.name == plant.name]
        delays = [result.delay for result in mine if result.delay is not None]
        delay = f"{statistics.median(delays):.0f}" if delays else "-"
        alarms = sorted({alarm for result in mine for alarm in result.alarms})
        print(f"{plant.name:30}{sum(r.found for r in mine)}/{len(mine)}  {delay:>6}  {' '.join(alarms)}")
    names = {plant.name for plant in healthy}
    sound = [result for result in results if result.name in names]
    for result in sound:
        if result.alarms:
            print(
                f"accused: {result.name}, seed {result.seed}: {'; '.join(map(' '.join, zip(result.alarms, result.titles, strict=True)))}"
            )
    bad = [result for result in results if result.name not in names]
    print(
        f"\nfound: {sum(r.found for r in bad)} of {len(bad)}; sound runs accused: {sum(bool(r.alarms) for r in sound)} of {len(sound)}"
    )


if __name__ == "__main__":
    main()
