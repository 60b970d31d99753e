"""How often `areal-debug crosscheck` is right: planted differences, equal steps, others' code.

    python -m benchmarks.crosscheck                          float64 alone
    python -m benchmarks.crosscheck --frameworks             with TRL and verl, if installed
    python -m benchmarks.crosscheck --record runs/demo/record    and its time on a record

The steps are those of tests/debug/crosscheck_steps.py, computed by plain loops in float32.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.config.import_paths import import_file
from benchmarks.harness import ROOT, read_options
from recorder import open_record
from replayer.crosscheck.frameworks import FRAMEWORKS, CannotRun
from replayer.crosscheck.opinions import crosscheck
from replayer.crosscheck.step_rows import StepRows, read_rows
from replayer.crosscheck.their_configs import options_of
from replayer.crosscheck.twin import Bounded, advantages_of, loss_inputs, loss_of

steps = import_file(str(ROOT / "tests/debug/crosscheck_steps.py"))  # an installed package may be `tests`


def main() -> None:
    options = read_options(__doc__, frameworks=False, equal=100, record="")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.frameworks, options.equal)
    if options.record:
        started = time.perf_counter()
        names = ["float64", *(FRAMEWORKS if options.frameworks else ())]
        report = crosscheck(read_rows(open_record(options.record), None), names)
        found["record"] = {"verdict": report.verdict, "seconds": time.perf_counter() - started}
    print(json.dumps(found, indent=1))


def measure(folder: Path, with_frameworks: bool, num_equal: int) -> dict[str, Any]:
    """Check every plant, equal steps, and the code of the frameworks against the twin."""
    stage = option = accused = 0
    for number, plant in enumerate(steps.PLANTS):
        rows = read(plant.write(folder / f"plant-{number}", seed=number))
        first = crosscheck(rows, opinions(rows, with_frameworks)).first
        assert first is not None, f"{plant.name} is not seen"
        named = first[1].changes[0].option if first[1].changes else None
        stage += first[1].stage == plant.stage
        option += named == plant.option
    equal = [read(steps.equal_step(seed, folder / f"equal-{seed}")) for seed in range(num_equal)]
    for rows in equal:
        accused += crosscheck(rows, opinions(rows, with_frameworks)).verdict != "equal"
    found: dict[str, Any] = {
        "plants": {"stage": stage, "option": option, "of": len(steps.PLANTS)},
        "equal": {"accused": accused, "of": num_equal},
    }
    if with_frameworks:
        found["code"] = {name: largest_difference(name, equal) for name in FRAMEWORKS}
    return found


def read(folder: Path) -> StepRows:
    """Read the only step of a record."""
    return read_rows(open_record(folder), None)


def opinions(rows: StepRows, with_frameworks: bool) -> list[str]:
    """Return the twin, and the code of the step's own trainer."""
    return ["float64", str(rows.origin.trainer)] if with_frameworks else ["float64"]


def largest_difference(name: str, given: list[StepRows]) -> dict[str, float]:
    """Compare a framework's code with the twin in float64: advantages, loss and its gradient."""
    framework, compared, largest = FRAMEWORKS[name](), 0, 0.0
    for rows in given:
        options = framework.view(options_of(rows.origin).options)
        try:
            theirs = framework.advantages(rows, options)
        except CannotRun:  # TRL: groups of different sizes
            continue
        twin = advantages_of(rows, options).value
        nothing = np.zeros(rows.mask.shape)
        inputs = loss_inputs(
            rows, options, rows.updates[0], Bounded(theirs, nothing), rows.tensors["current_logp"]
        )
        own = loss_of(inputs, options)
        loss, gradient = framework.loss(inputs, options)
        differences = (
            np.abs(theirs - twin).max(),
            abs(loss - own.value),
            float((gradient - own.gradient).abs().max()),
        )
        largest, compared = max(largest, *differences), compared + 1
    return {"compared": compared, "largest": float(largest)}


if __name__ == "__main__":
    main()
