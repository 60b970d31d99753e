"""What recording costs, as ratios from one run: time beside raw bytes, size beside other formats, latency of one sample.

    python benchmarks/recording.py [--rows 256] [--mean-tokens 2000] [--steps 10000] [--folder DIR]

Lengths are log-normal, ids Zipf over a vocabulary of 150,000, half of each row is sampled. Every writer waits for the disk (fsync),
takes the same padded batch, and its best of several runs counts; all files are read from the page cache.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recorder import Outcome, Plan, open_record
from recorder.format import STEP_FILE, rank_file, step_name
from recorder.sealed import seal, sync, unseal, write_durably
from recorder.tensors import FlatBatch, flatten
from recorder.testing import SCRIPTED_HEADER
from recorder.writer import commit_step, write_header, write_rank

PER_TOKEN = ("input_ids", "loss_mask", "logprobs", "versions")


def long_tailed_batch(num_rows: int, mean_tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A padded batch as a trainer holds it, with the keys and dtypes of ARCHITECTURE.md."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(rng.lognormal(np.log(mean_tokens) - 0.32, 0.8, num_rows).astype(int), 4)
    shape = (num_rows, int(lengths.max()))
    position = np.arange(shape[1])
    mask = position < lengths[:, None]
    trained = mask & (position >= lengths[:, None] // 2)
    return {
        "attention_mask": mask,
        "input_ids": np.where(mask, rng.zipf(1.2, shape) % 150_000, 0).astype(np.int32),
        "loss_mask": trained.astype(np.int32),
        "logprobs": np.where(trained, -rng.exponential(0.5, shape), 0).astype(np.float32),
        "versions": np.where(trained, 700 + (position > 500), np.where(mask, -1, 0)).astype(np.int32),
        "rewards": rng.integers(0, 2, num_rows).astype(np.float32),
        "prompt_id": np.arange(num_rows, dtype=np.int64) // 4,
        "sample_id": np.arange(num_rows, dtype=np.int32) % 4,
        "finish_reason": np.zeros(num_rows, np.int32),
    }


def best_seconds(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The shortest of several runs of each, taken in turns: what else the machine does hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {name: min(seconds) for name, seconds in times.items()}


def write_step(folder: Path, batch: FlatBatch) -> None:
    """What the recorder does at the end of a step on one rank, commit included."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(0, 1, (), {"loss": 0.5}, {f"layer.{i}.weight": "00112233" for i in range(300)})
    written = write_rank(folder, 0, 1, batch, Plan(0, 0, {"torch_cpu": "00" * 5056}, {}), outcome, None)
    commit_step(folder, 0, 1, [written])


def write_raw(folder: Path, sizes: dict[str, int]) -> None:
    """As many files with as many bytes each, with the same waits for the disk, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size_bytes in sizes.items():
        write_durably(folder / name, memoryview(RAW)[:size_bytes])
    sync(folder)
    sync(folder.parent)
    sync(folder)


RAW = bytearray(os.urandom(1 << 20)) * 256


def write_torch(file: Path, batch: dict[str, np.ndarray]) -> None:
    """torch.save of the padded batch."""
    import torch

    torch.save({key: torch.from_numpy(array) for key, array in batch.items()}, file)
    sync(file)


def write_json_lines(file: Path, batch: dict[str, np.ndarray]) -> None:
    """One JSON object a row with lists of numbers, the common rollout dump."""
    lengths = batch["attention_mask"].sum(axis=1)
    with file.open("w") as lines:
        for row, length in enumerate(lengths):
            values = {key: batch[key][row, :length].tolist() for key in PER_TOKEN}
            lines.write(json.dumps(values | {"reward": float(batch["rewards"][row])}) + "\n")
    sync(file)


def long_record(folder: Path, num_steps: int, batch: dict[str, np.ndarray]) -> None:
    """A record of many steps: the first is written, the others link to its files and have a step.json of their own."""
    first = folder / "steps" / step_name(0)
    write_step(first, flatten(batch))
    write_header(folder, SCRIPTED_HEADER)
    manifest = unseal((first / STEP_FILE).read_bytes(), STEP_FILE)
    names = [*manifest["batches"], *manifest["files"]]
    for step in range(1, num_steps):
        path = folder / "steps" / step_name(step)
        path.mkdir()
        for name in names:
            os.link(first / name, path / name)
        (path / STEP_FILE).write_bytes(seal(manifest | {"step": step}))


def compare_writers(folder: Path, batch: dict[str, np.ndarray], repeats: int) -> None:
    """Prints time and size of one step in each format."""
    num_tokens, flat = int(batch["attention_mask"].sum()), flatten(batch)
    step, torch_file, json_file = folder / "steps/000000", folder / "batch.pt", folder / "batch.jsonl"
    write_step(step, flat)
    sizes = {path.name: path.stat().st_size for path in step.iterdir()}
    seconds = best_seconds(
        {
            "raw": lambda: write_raw(folder / "raw", sizes),
            "record": lambda: write_step(step, flat),
            "flatten": lambda: flatten(batch),
            "torch": lambda: write_torch(torch_file, batch),
        },
        repeats,
    )
    seconds |= best_seconds({"json": lambda: write_json_lines(json_file, batch)}, 1)
    size_bytes = sum(sizes.values())
    rows = [
        ("same files, raw bytes", size_bytes, seconds["raw"]),
        ("record", size_bytes, seconds["record"]),
        ("record + remove padding", size_bytes, seconds["record"] + seconds["flatten"]),
        ("torch.save, padded", torch_file.stat().st_size, seconds["torch"]),
        ("JSON lines", json_file.stat().st_size, seconds["json"]),
    ]
    print(
        f"one step: {len(batch['rewards'])} rows, {num_tokens:,} tokens, {batch['input_ids'].shape[1]} wide"
    )
    print(f"{'format':<24}{'bytes/token':>12}{'ms':>10}{'time / raw':>12}")
    for name, size, wall_s in rows:
        ratio = wall_s / seconds["raw"]
        print(f"{name:<24}{size / num_tokens:>12.2f}{wall_s * 1000:>10.1f}{ratio:>12.2f}")
    batch_bytes = sizes[rank_file("batch", 0, 1, "safetensors")]
    print(f"batch file alone: {batch_bytes / num_tokens:.2f} bytes/token (goal: 9 to 13)")


def measure_latency(folder: Path, num_steps: int, repeats: int) -> None:
    """Prints the time from nothing to one sample out of the middle of a long record."""
    long_record(folder, num_steps, long_tailed_batch(64, 500))
    seconds = best_seconds(
        {
            "list": lambda: os.listdir(folder / "steps"),
            "open": lambda: open_record(folder),
            "sample": lambda: open_record(folder).step(num_steps // 2).rows(0, 7),
        },
        repeats,
    )
    listed, opened, sample = (f"{seconds[name] * 1000:.2f} ms" for name in ("list", "open", "sample"))
    print(f"\n{num_steps:,} steps: open and read one sample in {sample} (goal: under 10 ms)")
    print(f"of which opening {opened}, of which the operating system lists the folder in {listed}")


def main() -> None:
    """Runs both measurements in a temporary folder that is removed at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--mean-tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where to write; decides which disk is measured")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="recording-", dir=options.folder))
    try:
        compare_writers(
            folder / "writers", long_tailed_batch(options.rows, options.mean_tokens), options.repeats
        )
        measure_latency(folder / "long", options.steps, options.repeats)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
