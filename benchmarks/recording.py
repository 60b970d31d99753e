"""Cost of recording, as ratios from one run: time, waiting, size, and latency of one sample.

    python -m benchmarks.recording [--rows 512] [--mean-tokens 2000] [--steps 10000]
                                   [--step-seconds 4] [--folder DIR]

Time is compared with raw bytes and other formats. Lengths are log-normal, ids Zipf over a
vocabulary of 150,000, half of each row is sampled; a million tokens by default. Every writer waits
for the disk (fsync) and gets the same padded batch; the best of several runs counts. Files are read
from the page cache.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.safety.durable import sync, write_durably
from benchmarks.harness import best_in_turn, in_turn, read_options, report
from recorder import Outcome, Plan, RecordingOptions, RecordWriter, open_record, verify
from recorder.archive.pack import archive_record
from recorder.documents import checksummed_bytes, parse_checksummed
from recorder.format import STEP_FILE, rank_file, step_name
from recorder.header import write_header
from recorder.integrity.chain import link_to, write_end
from recorder.reader import parse_manifest
from recorder.step_files import RankStep, commit_step, write_rank
from recorder.tensors import FlatBatch, flatten
from recorder.testing import SCRIPTED_HEADER
from replayer.commits.first_step import bisect_steps

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


def scripted_outcome(first_weight: str = "00112233") -> Outcome:
    """Return the outcome of a step of a model with 300 parameters."""
    checksums = {f"layer.{i}.weight": "00112233" for i in range(300)}
    return Outcome(0, 1, (), {"loss": 0.5}, checksums | {"layer.0.weight": first_weight})


def write_step(folder: Path, batch: FlatBatch, outcome: Outcome | None = None) -> None:
    """Write a step as the recorder does on one rank, commit included."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(0, 0, {"torch_cpu": "00" * 5056}, {})
    step = RankStep(0, 1, batch, plan, outcome or scripted_outcome())
    commit_step(folder, 0, 1, [write_rank(folder, 0, 1, step)], None)


def write_raw(folder: Path, sizes: dict[str, int]) -> None:
    """Write as many files with as many bytes each and the same fsyncs, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size_bytes in sizes.items():
        write_durably(folder / name, memoryview(RAW)[:size_bytes])
    sync(folder)
    sync(folder.parent)
    sync(folder)


RAW = bytearray(os.urandom(1 << 20)) * 256


def write_torch(file: Path, batch: dict[str, np.ndarray]) -> None:
    import torch

    torch.save({key: torch.from_numpy(array) for key, array in batch.items()}, file)
    sync(file)


def write_slime(file: Path, batch: dict[str, np.ndarray]) -> None:
    """Write one dictionary per sample, of lists of numbers, with torch.save, as slime's dumps."""
    import torch

    lengths, samples = batch["attention_mask"].sum(axis=1), []
    for row, length in enumerate(lengths):
        trained = batch["loss_mask"][row, :length].astype(bool)
        samples.append(
            {
                "group_index": int(batch["prompt_id"][row]),
                "index": row,
                "tokens": batch["input_ids"][row, :length].tolist(),
                "response_length": int(trained.sum()),
                "loss_mask": batch["loss_mask"][row, :length][trained].tolist(),
                "rollout_log_probs": batch["logprobs"][row, :length][trained].tolist(),
                "weight_versions": [],
                "reward": float(batch["rewards"][row]),
                "status": "completed",
            }
        )
    torch.save({"rollout_id": 0, "samples": samples}, file)
    sync(file)


def write_verl(file: Path, batch: dict[str, np.ndarray]) -> None:
    """Pickle the padded tensors as verl's skipped rollouts, by torch.save; ids are int64."""
    import torch

    ids, mask = (torch.from_numpy(batch[key].astype(np.int64)) for key in ("input_ids", "attention_mask"))
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": ids,
        "response_mask": torch.from_numpy(batch["loss_mask"].astype(np.int64)),
        "rollout_log_probs": torch.from_numpy(batch["logprobs"]),
        "rm_scores": torch.zeros_like(torch.from_numpy(batch["logprobs"])),
    }
    saved = io.BytesIO()
    torch.save(tensors, saved)
    others = {"uid": batch["prompt_id"].astype(str).astype(object)}
    file.write_bytes(pickle.dumps((saved.getvalue(), others, {"global_steps": 0})))
    sync(file)


def write_nemo_rl(file: Path, batch: dict[str, np.ndarray]) -> None:
    """Write a JSON object a row of lists that are padded to the longest, as NeMo-RL's dump."""
    with file.open("w") as lines:
        for row in range(len(batch["rewards"])):
            values = {
                "content": [""],
                "rewards": [float(batch["rewards"][row])],
                "input_lengths": [int(batch["attention_mask"][row].sum())],
                "token_ids": [batch["input_ids"][row].tolist()],
                "token_loss_mask": [batch["loss_mask"][row].tolist()],
                "sample_loss_mask": [1.0],
                "advantages": [[0.125] * batch["input_ids"].shape[1]],
                "generation_logprobs": [batch["logprobs"][row].tolist()],
                "prev_logprobs": [batch["logprobs"][row].tolist()],
                "idx": row,
            }
            lines.write(json.dumps(values) + "\n")
    sync(file)


def write_json_lines(file: Path, batch: dict[str, np.ndarray]) -> None:
    """Write one JSON object per row with lists of numbers, the common rollout dump."""
    lengths = batch["attention_mask"].sum(axis=1)
    with file.open("w") as lines:
        for row, length in enumerate(lengths):
            values = {key: batch[key][row, :length].tolist() for key in PER_TOKEN}
            lines.write(json.dumps(values | {"reward": float(batch["rewards"][row])}) + "\n")
    sync(file)


def long_record(folder: Path, num_steps: int, batch: dict[str, np.ndarray]) -> None:
    """Write a record of many steps: the first in full, the others as links with a new step.json."""
    first = folder / "steps" / step_name(0)
    write_step(first, flatten(batch))
    write_header(folder, SCRIPTED_HEADER)
    manifest = parse_checksummed((first / STEP_FILE).read_bytes(), STEP_FILE)
    names = [*manifest["batches"], *manifest["files"]]
    for step in range(1, num_steps):
        path = folder / "steps" / step_name(step)
        path.mkdir()
        for name in names:
            os.link(first / name, path / name)
        (path / STEP_FILE).write_bytes(checksummed_bytes(manifest | {"step": step}))


# What other trainers write of a step, by the name of its file here.
OTHERS: dict[str, Callable[[Path, dict[str, np.ndarray]], None]] = {
    "torch.save, padded": write_torch,
    "slime's dump": write_slime,
    "verl's rollouts": write_verl,
    "NeMo-RL's dump": write_nemo_rl,
    "JSON lines": write_json_lines,
}


def compare_writers(folder: Path, batch: dict[str, np.ndarray], repeats: int) -> None:
    """Print time and size of one step in each format."""
    num_tokens, flat = int(batch["attention_mask"].sum()), flatten(batch)
    record, archive, step = folder / "record", folder / "archive", folder / "record/steps/000000"
    write_step(step, flat)
    sizes = {path.name: path.stat().st_size for path in step.iterdir()}
    seconds = best_in_turn(
        {
            "raw": lambda: write_raw(folder / "raw", sizes),
            "record": lambda: write_step(step, flat),
            "flatten": lambda: flatten(batch),
        },
        repeats,
    )
    write_header(record, SCRIPTED_HEADER)
    seconds |= best_in_turn({"archive": lambda: archive_record(record, archive, overwrite=True)}, 2)
    archive_bytes = sum(path.stat().st_size for path in archive.rglob("*") if path.is_file())
    size_bytes = sum(sizes.values())
    works = {name: partial(write, folder / name, batch) for name, write in OTHERS.items()}
    taken = in_turn({"record": lambda: write_step(step, flatten(batch)), **works}, 3)
    what = f"a step of {num_tokens:,} tokens"
    for name in OTHERS:
        report(what, name, "s", taken["record"], taken[name])
        report(f"{what}, size", name, "MB", [size_bytes / 1e6], [(folder / name).stat().st_size / 1e6])
    rows = [
        ("same files, raw bytes", size_bytes, seconds["raw"]),
        ("record", size_bytes, seconds["record"]),
        ("record + remove padding", size_bytes, seconds["record"] + seconds["flatten"]),
        ("record, archived later", archive_bytes, seconds["archive"]),
        *((name, (folder / name).stat().st_size, min(taken[name])) for name in OTHERS),
    ]
    print(
        f"\none step: {len(batch['rewards'])} rows, {num_tokens:,} tokens, {batch['input_ids'].shape[1]} wide"
    )
    print(f"{'format':<24}{'bytes/token':>12}{'ms':>10}{'time / raw':>12}")
    for name, size, wall_s in rows:
        ratio = wall_s / seconds["raw"]
        print(f"{name:<24}{size / num_tokens:>12.2f}{wall_s * 1000:>10.1f}{ratio:>12.2f}")
    batch_bytes = sizes[rank_file("batch", 0, 1, "safetensors")]
    print(f"batch file alone: {batch_bytes / num_tokens:.2f} bytes/token (goal: 9 to 13)")


def busy_step(seconds: float) -> float:
    """Compute for as long as a training step of `seconds` alone; return the seconds it took."""
    matrix = np.ones((512, 512), np.float32)
    begin = time.perf_counter()
    for _ in range(int(seconds / SECONDS_A_PRODUCT)):
        matrix @ matrix
    return time.perf_counter() - begin


def seconds_a_product() -> float:
    """Return the seconds of one product of `busy_step`."""
    matrix = np.ones((512, 512), np.float32)
    return best_in_turn({"product": lambda: [matrix @ matrix for _ in range(20)]}, 5)["product"] / 20


SECONDS_A_PRODUCT = seconds_a_product()


def measure_background(folder: Path, batch: dict[str, np.ndarray], step_s: float, rounds: int) -> None:
    """Print what background recording costs the training thread: in the recorder, per step."""
    writer = RecordWriter(folder, options=RecordingOptions(queue_steps=2))
    folder.mkdir()
    write_header(folder, SCRIPTED_HEADER)
    inside: list[float] = []
    steps: dict[str, list[float]] = {"bare": [], "recorded": []}

    def tell(event: str, **facts: Any) -> None:
        begin = time.perf_counter()
        writer(event, **facts)
        inside[-1] += time.perf_counter() - begin

    for step in range(rounds):
        steps["bare"].append(busy_step(step_s))
        inside.append(0.0)
        begin = time.perf_counter()
        tell("batch", step=step, version=step, batch=batch, rng={"torch_cpu": "00" * 5056})
        busy_step(step_s / 2)
        checksums = scripted_outcome().checksums
        tell("step", step=step, version=step + 1, plan={}, stats={"loss": 0.5}, checksums=checksums)
        busy_step(step_s / 2)  # the writer thread works at the same time
        steps["recorded"].append(time.perf_counter() - begin)
    writer("end", steps=rounds, error=None)
    num_tokens, wait_s = int(batch["attention_mask"].sum()), statistics.median(inside)
    bare, recorded = (statistics.median(steps[kind]) for kind in ("bare", "recorded"))
    print(f"\nin the background: the training thread spends {wait_s * 1000:.1f} ms per step in the recorder")
    print(
        f"that is {wait_s / bare:.2%} of a step of {bare:.1f} s, and under 0.5 % for trainers slower than "
        f"{num_tokens / wait_s * 0.005:,.0f} tokens/s per rank (goal: under 0.5 %)"
    )
    print(
        f"complete steps: bare {bare:.3f} s ({min(steps['bare']):.3f} to {max(steps['bare']):.3f}), "
        f"recorded {recorded:.3f} s ({min(steps['recorded']):.3f} to {max(steps['recorded']):.3f}), ratio {recorded / bare:.4f}"
    )


def measure_chain(folder: Path, batch: dict[str, np.ndarray], step_s: float) -> None:
    """Print what the chain costs a recorded step, and what a reader's checks cost."""
    write_step(folder / "steps" / step_name(0), flatten(batch))
    write_header(folder, SCRIPTED_HEADER)
    data = (folder / "steps" / step_name(0) / STEP_FILE).read_bytes()
    link = link_to(folder, 0)
    of_64_ranks = data * 64
    works: dict[str, tuple[str, Callable[[], Any]]] = {
        f"sha256 of step.json, {len(data):,} bytes": ("writer", lambda: hashlib.sha256(data).hexdigest()),
        f"the same of 64 ranks, {len(of_64_ranks):,} bytes": (
            "writer",
            lambda: hashlib.sha256(of_64_ranks).hexdigest(),
        ),
        "end.json, once a run, with fsync": ("writer", lambda: write_end(folder, True, link)),
        "parse step.json and check it": ("reader", lambda: parse_manifest(data, 0)),
        "read the step and check it": ("reader", lambda: open_record(folder).step(0).batch(0)),
        "verify the record of this step": ("reader", lambda: verify(folder)),
    }
    print(
        f"\nthe chain and the checks, as a share of a step of {step_s:g} s (goal of the writer: under 0.5 %)"
    )
    for name, seconds in best_in_turn({name: work for name, (_, work) in works.items()}, 9).items():
        print(f"  {works[name][0]}: {name:<44}{seconds * 1000:>9.3f} ms{seconds / step_s:>10.4%}")


def diverge_from(record: Path, other: Path, num_steps: int, first: int) -> None:
    """Link a second record to the files of the first; weights differ from step `first` on."""
    long_record(other, num_steps, long_tailed_batch(64, 500))
    folder = other / "steps" / step_name(num_steps)
    write_step(folder, flatten(long_tailed_batch(64, 500)), scripted_outcome("ffffffff"))
    manifest = parse_checksummed((folder / STEP_FILE).read_bytes(), STEP_FILE)
    name = rank_file("outcome", 0, 1, "json")
    for step in range(first, num_steps):
        path = other / "steps" / step_name(step)
        (path / name).unlink()
        os.link(folder / name, path / name)
        (path / STEP_FILE).write_bytes(checksummed_bytes(manifest | {"step": step}))
    shutil.rmtree(folder)


def measure_latency(folder: Path, num_steps: int, repeats: int) -> None:
    """Print the time to open a long record and read one sample, and to find where two diverge."""
    from click.testing import CliRunner

    from areal_debug.cli import main as areal_debug

    record, other = folder / "long", folder / "other"
    long_record(record, num_steps, long_tailed_batch(64, 500))
    diverge_from(record, other, num_steps, first=num_steps * 3 // 4)

    def show() -> None:
        arguments = ["record", "show", str(record), "--step", str(num_steps // 2), "--sample", "7"]
        assert CliRunner().invoke(areal_debug, arguments).exit_code == 0

    def bisect() -> None:
        assert bisect_steps(open_record(record), open_record(other)).step == num_steps * 3 // 4

    works = {
        "the operating system lists the folder": lambda: os.listdir(record / "steps"),
        "open": lambda: open_record(record),
        "open and read one sample (goal: 10 ms)": lambda: open_record(record).step(num_steps // 2).rows(0, 7),
        "record show of one sample (goal: 100 ms)": show,
        "open both and bisect-step (goal: 100 ms)": bisect,
    }
    print(f"a record of {num_steps:,} steps")
    for name, seconds in best_in_turn(works, repeats).items():
        print(f"  {name:<44}{seconds * 1000:>8.2f} ms")


def main() -> None:
    """Run all measurements in a temporary folder that is removed at the end."""
    options = read_options(
        __doc__, rows=512, mean_tokens=2000, steps=10_000, repeats=15, step_seconds=4.0, rounds=5, folder=""
    )
    folder = Path(tempfile.mkdtemp(prefix="recording-", dir=options.folder or None))
    try:
        measure_latency(folder, options.steps, options.repeats)  # first: garbage of others would slow it down
        batch = long_tailed_batch(options.rows, options.mean_tokens)
        compare_writers(folder / "writers", batch, options.repeats)
        measure_chain(folder / "chain", batch, options.step_seconds)
        measure_background(folder / "background", batch, options.step_seconds, options.rounds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
