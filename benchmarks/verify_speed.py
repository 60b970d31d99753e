"""Cost of `record verify` for a record of many small steps, beside reading each file once.

    python benchmarks/verify_speed.py [--steps 1000] [--rows 32] [--mean-tokens 200] [--rounds 3]

Each step has files of its own: a batch, a plan, an outcome with the checksums of 300 parameters.
The other side opens each file once and computes one crc32c. CPU seconds, in turn; the ratio is the
median of those of one round.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
from crc32c import crc32c
from recording import long_tailed_batch, scripted_outcome

from recorder import Plan, verify
from recorder.format import STEPS_FOLDER, StepLink, step_name
from recorder.header import write_header
from recorder.integrity.chain import write_end
from recorder.step_files import RankStep, commit_step, write_rank
from recorder.tensors import flatten
from recorder.testing import SCRIPTED_HEADER


def write_record(folder: Path, num_steps: int, num_rows: int, mean_tokens: int) -> None:
    """Write a record of one rank."""
    batch, link = long_tailed_batch(num_rows, mean_tokens), None
    for step in range(num_steps):
        batch["prompt_id"] = np.arange(num_rows, dtype=np.int64) // 4 + step * num_rows
        link = write_step(folder / STEPS_FOLDER / step_name(step), step, batch, link)
    write_header(folder, SCRIPTED_HEADER)
    write_end(folder, True, link)


def write_step(folder: Path, step: int, batch: dict[str, np.ndarray], link: StepLink | None) -> StepLink:
    """Write and commit one step."""
    folder.mkdir(parents=True)
    outcome = dataclasses.replace(scripted_outcome(), step=step, version=step + 1)
    recorded = RankStep(step, step + 1, flatten(batch), Plan(step, step, {}, {}), outcome)
    return commit_step(folder, step, step + 1, [write_rank(folder, 0, 1, recorded)], link).link


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--mean-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "record"
        with mock.patch("os.fsync"):  # the disk is not measured here
            write_record(folder, options.steps, options.rows, options.mean_tokens)
        files = [path for path in folder.rglob("*") if path.is_file()]
        size_bytes = sum(path.stat().st_size for path in files)
        assert verify(folder).intact
        rounds = [
            (
                cpu_seconds(lambda: [crc32c(path.read_bytes()) for path in files]),
                cpu_seconds(lambda: verify(folder)),
            )
            for _ in range(options.rounds)
        ]
    verified = statistics.median(seconds for _, seconds in rounds)
    ratios = sorted(verified / once for once, verified in rounds)
    print(
        f"{options.steps:,} steps, {len(files):,} files, {size_bytes / 1e6:.0f} MB: verify {verified:.2f} s of CPU (goal 3 s), "
        f"{statistics.median(ratios):.1f} times reading each file once ({ratios[0]:.1f} to {ratios[-1]:.1f})"
    )


if __name__ == "__main__":
    main()
