"""A small record with known contents, written by the real writer, for tests and benchmarks."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recorder.format import FORMAT_VERSION, RecordHeader
from recorder.header import write_header
from recorder.writer import RankState, RecordingOptions, RecordWriter

SCRIPTED_HEADER = RecordHeader(
    format_version=FORMAT_VERSION,
    created="2026-01-01T00:00:00+00:00",
    world_size=1,
    num_ranks=1,
    allocation="fsdp:d1",
    model={"path": "model", "files": {}},
    tokenizer=None,
    environment={"torch": {"build": "2.13.0"}, "code": {"commit": None, "dirty_sha256": None}},
    config={"seed": 1, "actor": {"lr": 1e-6}},
)


SCRIPTED_RNG = {"torch": "c2VlZA=="}


def scripted_batch(lengths: Sequence[int], seed: int = 0, prompt_length: int = 2) -> dict[str, np.ndarray]:
    """Return a padded batch with the keys and dtypes of ARCHITECTURE.md, one row per length.

    The same seed gives the same bits, another one other prompts, too.
    """
    rng = np.random.default_rng(seed)
    num_rows, width = len(lengths), max(lengths, default=0)
    position = np.arange(width)
    mask = position < np.asarray(lengths, np.int64)[:, None]
    trained = mask & (position >= prompt_length)
    shape = (num_rows, width)
    return {
        "input_ids": np.where(mask, rng.integers(1, 500, shape), 0).astype(np.int32),
        "attention_mask": mask,
        "loss_mask": trained.astype(np.int32),
        "logprobs": np.where(trained, -rng.exponential(1.0, shape), 0).astype(np.float32),
        "versions": np.where(trained, seed, np.where(mask, -1, 0)).astype(np.int32),
        "rewards": rng.integers(0, 2, num_rows).astype(np.float32),
        "prompt_id": 1000 * seed + np.arange(num_rows, dtype=np.int64) // 2,
        "sample_id": np.arange(num_rows, dtype=np.int32) % 2,
        "finish_reason": np.zeros(num_rows, np.int32),
    }


def in_step(batch: dict[str, np.ndarray], step: int, rank: int = 0) -> dict[str, np.ndarray]:
    return batch | {"prompt_id": batch["prompt_id"] % 1000 + 1000 * (100 * step + rank)}


def literal_batch() -> dict[str, np.ndarray]:
    """The batch of the worked example in FORMAT.md: two rows, five tokens, three wide."""
    mask = np.array([[True, True, True], [True, True, False]])
    return {
        "attention_mask": mask,
        "input_ids": np.array([[1, 2, 3], [4, 300, 0]], np.int32),
        "loss_mask": np.array([[0, 1, 1], [0, 1, 0]], np.int32),
        "logprobs": np.array([[0, -0.5, -1], [0, -2, 0]], np.float32),
        "versions": np.array([[-1, 0, 0], [-1, 0, 0]], np.int32),
        "rewards": np.array([1, 0], np.float32),
        "prompt_id": np.array([7, 8], np.int64),
        "sample_id": np.array([0, 0], np.int32),
        "finish_reason": np.array([0, 1], np.int32),
    }


def scripted_learning(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    mask, rewards, logprobs = (np.asarray(batch[key]) for key in ("loss_mask", "rewards", "logprobs"))
    trained = np.roll(mask, -1, axis=1).astype(np.float32)
    advantages = trained * (rewards[:, None] - np.float32(0.5))
    prox_logp = np.roll(logprobs, -1, axis=1) * np.float32(1.001)
    return {"prox_logp": prox_logp, "advantages": advantages}


def start_facts(rank: int = 0, num_ranks: int = 1, **config: Any) -> dict[str, Any]:
    return {
        "config": SCRIPTED_HEADER.config | {"allocation_mode": f"fsdp:d{num_ranks}", **config},
        "rank": rank,
        "world_size": num_ranks,
        "data_parallel_rank": rank,
        "data_parallel_size": num_ranks,
        "model_path": "model",
        "tokenizer": None,
        "version": 0,
    }


def send_step(observer: Any, step: int, batch: dict[str, Any], rng: Mapping[str, str] = SCRIPTED_RNG) -> None:
    num_rows = len(batch["rewards"])
    observer("batch", step=step, version=step, batch=batch, rng=rng)
    observer("advantages", step=step, inputs=batch | scripted_learning(batch))
    observer(
        "micro_batch",
        step=step,
        minibatch=0,
        micro_batch=0,
        rows=list(range(num_rows)),
        num_tokens=int(batch["attention_mask"].sum()),
        loss=0.5 + step,
        weight=float(num_rows),
    )
    observer(
        "step",
        step=step,
        version=step + 1,
        plan={"learning_rate": 1e-6},
        stats={"grad_norm": 1 / (step + 3), "clip_ratio": 0.0},
        checksums={"layer.weight": f"{step:08x}"},
    )


def gatherers(num_ranks: int) -> list[Callable[[RankState], list[RankState]]]:
    barrier = threading.Barrier(num_ranks)
    states: list[Any] = [None] * num_ranks

    def gatherer(rank: int) -> Callable[[RankState], list[RankState]]:
        def gather(state: RankState) -> list[RankState]:
            states[rank] = state
            barrier.wait()  # all have set theirs
            gathered = list(states)
            barrier.wait()  # all have read before any sets the next
            return gathered

        return gather

    return [gatherer(rank) for rank in range(num_ranks)]


def write_scripted_record(
    folder: Path,
    num_steps: int = 3,
    num_ranks: int = 1,
    num_rows: int = 4,
    rng: Mapping[str, str] = SCRIPTED_RNG,
    options: RecordingOptions = RecordingOptions(),
) -> None:
    lengths = [3 + (5 * row) % 7 for row in range(num_rows)]
    writers = [
        RecordWriter(folder, rank, num_ranks, gather, options)
        for rank, gather in enumerate(gatherers(num_ranks))
    ]
    folder.mkdir(parents=True)
    changes = {"num_ranks": num_ranks, "world_size": num_ranks, "recording": options.recording}
    write_header(folder, RecordHeader(**{**vars(SCRIPTED_HEADER), **changes}))

    def run(rank: int) -> None:
        for step in range(num_steps):
            send_step(writers[rank], step, scripted_batch(lengths, seed=100 * step + rank), rng)
        writers[rank]("end", steps=num_steps, error=None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_worked_example(folder: Path) -> None:
    """Write the record that FORMAT.md lists, into an empty or absent folder."""
    writer = RecordWriter(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_header(folder, SCRIPTED_HEADER)
    send_step(writer, 0, literal_batch())
    writer("end", steps=1, error=None)
