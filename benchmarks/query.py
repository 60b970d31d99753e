"""Time and memory of a query over millions of samples.

    python benchmarks/query.py [--samples 2500000] [--steps 2500] [--folder DIR]

Writes a record of short samples with our own writer, then runs `areal-debug query` on it as a user
does, each query in a process of its own. The goal is 5 s and 1 GiB for the first one.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from recorder.format import STEPS_FOLDER, step_name
from recorder.header import write_header
from recorder.step_files import RankStep, commit_step, write_rank
from recorder.tensors import FlatBatch, FlatTensor
from recorder.testing import SCRIPTED_HEADER

TOKENS, GROUP = 8, 8  # of a sample; samples of a prompt
QUERIES = (
    "select prompt_id, avg(reward) from samples group by 1",
    "select step, avg(reward), count(*) from samples group by step order by step",
    "select count(*) from tokens where step = 7",
    "select avg(logprob) from tokens where loss_mask = 1",
)


def write_record(folder: Path, num_samples: int, num_steps: int) -> None:
    """Write steps of equal size."""
    folder.mkdir()
    write_header(folder, SCRIPTED_HEADER)
    rng, rows, previous = np.random.default_rng(0), num_samples // num_steps, None
    for step in range(num_steps):
        tokens = rows * TOKENS
        mask = np.tile(np.arange(TOKENS) >= TOKENS // 2, rows)
        tensors = {
            "cu_seqlens": FlatTensor("I64", "offset", np.arange(rows + 1) * TOKENS),
            "input_ids": FlatTensor("I32", "token", rng.integers(0, 50_000, tokens, np.uint16)),
            "loss_mask": FlatTensor("I32", "token", mask.astype(np.uint8)),
            "logprobs": FlatTensor("F32", "token", -rng.random(tokens, np.float32) * mask),
            "versions": FlatTensor("I32", "token", np.where(mask, step, -1).astype(np.int16)),
            "rewards": FlatTensor("F32", "row", rng.integers(0, 2, rows).astype(np.float32)),
            "prompt_id": FlatTensor("I64", "row", (step * rows + np.arange(rows)) // GROUP),
            "sample_id": FlatTensor("I32", "row", (np.arange(rows) % GROUP).astype(np.int32)),
            "finish_reason": FlatTensor("I32", "row", np.zeros(rows, np.int32)),
        }
        place = folder / STEPS_FOLDER / step_name(step)
        place.mkdir(parents=True)
        content = RankStep(step, step + 1, FlatBatch(rows, tokens, TOKENS, tensors), None, None, None, None)
        previous = commit_step(place, step, step + 1, [write_rank(place, 0, 1, content)], previous).link


def measure(folder: Path, query: str) -> tuple[float, int]:
    """Return the seconds that the command takes, and the peak memory of its largest process."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "areal_debug", "query", str(folder), query, "--limit", "3"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)  # usage includes that of the confined child
    assert status == 0
    return time.perf_counter() - begin, usage.ru_maxrss * 1024


def main() -> None:
    """Write the record, run the queries, print a line a query; remove the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=2_500_000)
    parser.add_argument("--steps", type=int, default=2_500)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder)) / "record"
    try:
        write_record(folder, options.samples, options.steps)
        for query in QUERIES:
            seconds, peak_bytes = measure(folder, query)
            print(f"{seconds:6.2f} s  {peak_bytes / 2**20:5.0f} MiB  {query}")
    finally:
        shutil.rmtree(folder.parent)


if __name__ == "__main__":
    main()
