"""Measure `areal-debug doctor` on the failures that two other tools draw.

rldoctor (`rl_doctor.simulate`) and rlprobe (`rlprobe.testing.synth`) generate metrics of runs with
one known failure each. Every run is written as TRL and as verl log it, read by the verb, and
judged: the rate at which the failure is named, its onset, and healthy runs that are accused.
Install them where this runs: `pip install rldoctor==0.2.0 rlprobe==0.1.0`.

    python -m benchmarks.doctor_generators --seeds 20 --healthy 100
    python -m benchmarks.doctor_generators --seeds 20 --variants noise,sparse --steps 60,400,2000
"""

import argparse
import importlib.util
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import yaml
from click.testing import CliRunner

from areal_debug.cli import main
from benchmarks.harness import ROOT, read_options

Row = dict[str, Any]

DRAWN = yaml.safe_load((ROOT / "benchmarks/doctor_plants/drawn.yaml").read_text())
TRL, VERL = DRAWN["trl"], DRAWN["verl"]


class Collected:
    """Stands in for rlprobe's writer: keeps the rows instead of writing tables."""

    rows: list[Row] = []

    def __init__(self, *_: object) -> None:
        Collected.rows = []

    def __enter__(self) -> "Collected":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        return None

    def add_step(self, step: Any) -> None:
        Collected.rows.append(step.model_dump())

    def add_samples(self, *_: object) -> None:
        return None

    def log_event(self, *_: object) -> None:
        return None


def rows_of_rldoctor(failure: str, steps: int, seed: int) -> list[Row]:
    """Return the rows of a run under TRL's names."""
    from rl_doctor.simulate import simulate

    rows: list[Row] = simulate(failure, n_steps=steps, seed=seed)[0]
    return rows


def rows_of_rlprobe(failure: str, steps: int, seed: int) -> list[Row]:
    """Return the rows of a run under TRL's names; the failure begins in the middle."""
    from rlprobe.testing import synth

    synth.RunWriter = Collected
    synth.generate_run(
        "nowhere",
        None if failure == "healthy" else failure,
        n_steps=steps,
        seed=seed,
        sample_every=steps + 1,
        samples_per_step=4,
    )
    return [renamed_row(row) for row in Collected.rows]


def renamed_row(row: Row) -> Row:
    """Return a row of rlprobe under TRL's names, without columns that have no value."""
    flat = {TRL.get(name, name): value for name, value in row.items() if isinstance(value, int | float)}
    flat |= {f"rewards/{name}/mean": value for name, value in row["reward_components"].items()}
    return flat | {f"kl_positional/{i}": value for i, value in enumerate(row["kl_positional"])}


GENERATORS: dict[str, tuple[str, Callable[[str, int, int], list[Row]]]] = {
    "rldoctor": ("rl_doctor", rows_of_rldoctor),
    "rlprobe": ("rlprobe", rows_of_rlprobe),
}


def noisy(rows: list[Row], seed: int) -> list[Row]:
    """Add to every metric twice its own scatter from step to step."""
    generator = np.random.default_rng(seed)
    made = [dict(row) for row in rows]
    for name in {name for row in rows for name in row} - {"step", "learning_rate", "timestamp", "rank"}:
        at = [i for i, row in enumerate(rows) if name in row]
        values = np.array([rows[i][name] for i in at], np.float64)
        scatter = float(np.median(np.abs(np.diff(values)))) / 0.954 if len(values) > 2 else 0.0
        changed = values + generator.normal(0, 2 * scatter, len(values))
        if (values >= 0).all():
            changed = np.abs(changed)
        for i, value in zip(at, changed.tolist(), strict=True):
            made[i][name] = value
    return made


def sparse(rows: list[Row], seed: int) -> list[Row]:
    """Keep every fifth step, and those with an evaluation."""
    return [row for row in rows if row["step"] % 5 == 0 or "eval/accuracy" in row]


VARIANTS: dict[str, Callable[[list[Row], int], list[Row]]] = {
    "plain": lambda rows, seed: rows,
    "noise": noisy,
    "sparse": sparse,
}
# Seven single steps: a log of every fifth step holds one or two of them.
HIDDEN = {("grad_spikes", "sparse")}


def write(rows: Iterable[Row], names: str, file: Path) -> None:
    """Write metrics as TRL's history or as verl's file logger."""
    with file.open("w") as out:
        for row in rows:
            if names == "verl":
                data = {VERL.get(name, name): value for name, value in row.items() if name != "step"}
                row = {"step": row["step"], "data": data}
            out.write(json.dumps(row) + "\n")


def judge(rows: list[Row], names: str, folder: Path) -> dict[str, Any]:
    write(rows, names, folder / "metrics.jsonl")
    done = CliRunner().invoke(main, ["doctor", str(folder / "metrics.jsonl"), "--json"])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def named(report: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return the alarm that names the failure."""
    ids, word = wanted["ours"], wanted.get("word", "")
    found = (alarm for alarm in report["alarms"] if alarm["id"] in ids and word in alarm["title"])
    return next(found, None)


def measure(generator: str, options: argparse.Namespace, folder: Path) -> None:
    rows_of = GENERATORS[generator][1]
    right: Counter[tuple[str, str, str, int]] = Counter()
    total: Counter[tuple[str, str, str, int]] = Counter()
    first: Counter[str] = Counter()
    others: dict[str, Counter[str]] = defaultdict(Counter)
    delays: dict[str, list[float]] = defaultdict(list)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for steps in options.steps:
        for failure, wanted in DRAWN[generator].items():
            for seed in seeds:
                rows = rows_of(failure, steps, seed)
                for variant in options.variants:
                    if (failure, variant) in HIDDEN:
                        continue
                    for names in options.names:
                        report = judge(VARIANTS[variant](rows, seed), names, folder)
                        alarm = named(report, wanted)
                        key = (failure, variant, names, steps)
                        total[key] += 1
                        right[key] += alarm is not None
                        first[failure] += alarm is not None and report["alarms"][0]["id"] == alarm["id"]
                        others[failure].update(
                            one["id"] for one in report["alarms"] if one["id"] not in wanted["ours"]
                        )
                        if alarm is not None and alarm["onset"] is not None:
                            delays[failure].append((alarm["onset"] - steps / 2) / steps)
    accused, healthy = count_accused(generator, options, folder)
    for failure in DRAWN[generator]:
        keys = [key for key in total if key[0] == failure]
        count = sum(total[key] for key in keys)
        missed = [
            f"{key[1]}/{key[2]}/{key[3]}: {right[key]} of {total[key]}"
            for key in keys
            if right[key] < total[key]
        ]
        print(
            f"  {failure:<20} {sum(right[key] for key in keys):>4} of {count}, first {first[failure]}"
            + (
                f", onset {np.median(np.abs(delays[failure])):.3f} off"
                if generator == "rlprobe" and delays[failure]
                else ""
            )
            + (f"; also {dict(others[failure])}" if others[failure] else "")
            + (f"\n    missed: {missed}" if missed else "")
        )
    named_count, all_count = sum(right.values()), sum(total.values())
    print(f"{generator}: {named_count} of {all_count} named ({100 * named_count / max(1, all_count):.1f} %)")
    print(f"{generator}: {sum(accused.values())} alarms in {healthy} healthy runs {dict(accused)}")


def count_accused(generator: str, options: argparse.Namespace, folder: Path) -> tuple[Counter[str], int]:
    """Return the alarms of healthy runs, and the number of runs judged."""
    accused: Counter[str] = Counter()
    healthy = 0
    for steps in options.steps:
        for seed in range(options.first_seed, options.first_seed + options.healthy):
            rows = GENERATORS[generator][1]("healthy", steps, seed)
            for variant in options.variants:
                for names in options.names:
                    report = judge(VARIANTS[variant](rows, seed), names, folder)
                    accused.update(f"{one['id']}/{variant}/{names}/{steps}" for one in report["alarms"])
                    healthy += 1
    return accused, healthy


def main_of_benchmark() -> None:
    options = read_options(
        __doc__,
        seeds=20,
        first_seed=0,
        healthy=100,
        steps=[400],
        variants=["plain"],
        names=["trl", "verl"],
        generators=list(GENERATORS),
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for generator in options.generators:
            if importlib.util.find_spec(GENERATORS[generator][0]) is None:
                print(f"{generator} is not installed: pip install {generator}")
                continue
            measure(generator, options, Path(folder))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main_of_benchmark()
