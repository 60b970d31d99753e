"""Cost of recording a step, as ratios from one run: time and size of each format.

    python -m benchmarks.recording [--rows 512] [--mean-tokens 2000] [--repeats 15] [--folder DIR]

Time is compared with raw bytes and other formats. Lengths are log-normal, ids Zipf over a
vocabulary of 150,000, half of each row is sampled; a million tokens by default. Every writer waits
for the disk (fsync) and gets the same padded batch; the best of several runs counts.
"""

import io
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from areal_core.safety.durable import sync, write_durably
from benchmarks.harness import best_in_turn, in_turn, read_options, report
from recorder import Outcome, Plan
from recorder.archive.pack import archive_record
from recorder.format import rank_file
from recorder.header import write_header
from recorder.step_files import RankStep, commit_step, write_rank
from recorder.tensors import FlatBatch, flatten
from recorder.testing import SCRIPTED_HEADER

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


def write_step(folder: Path, batch: FlatBatch) -> None:
    """Write a step of a model with 300 parameters as the recorder does on one rank, commit included."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(0, 0, {"torch_cpu": "00" * 5056}, {})
    checksums = {f"layer.{i}.weight": "00112233" for i in range(300)}
    step = RankStep(0, 1, batch, plan, Outcome(0, 1, (), {"loss": 0.5}, checksums))
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


def main() -> None:
    """Compare the writers in a temporary folder that is removed at the end."""
    options = read_options(__doc__, rows=512, mean_tokens=2000, repeats=15, folder="")
    with tempfile.TemporaryDirectory(prefix="recording-", dir=options.folder or None) as folder:
        batch = long_tailed_batch(options.rows, options.mean_tokens)
        compare_writers(Path(folder), batch, options.repeats)


if __name__ == "__main__":
    main()
