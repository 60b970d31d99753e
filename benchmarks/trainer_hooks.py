"""Cost of the adapters for slime, prime-rl, NeMo-RL and AReaL per step, and NeMo-RL's own dump.

    python -m benchmarks.trainer_hooks [--rows 512] [--mean-tokens 2000] [--steps 3] [--folder DIR]

`waits` is how long the trainer's thread is held up, `cpu` what all threads of the process use; both
are seconds per step, the median of the steps. Lengths are log-normal; a million tokens by default.
prime-rl is not on the package index: its loss is replaced by one of a few operations.
"""

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
import types
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_debug import nemo_rl, prime_rl
from benchmarks.harness import read_options, report
from recorder.trainers import slime
from recorder.trainers.guarded import Guarded
from recorder.trainers.prime_rl import Observation


@dataclass(frozen=True)
class Row:
    """One sequence; the second half is sampled."""

    tokens: list[int]
    logprobs: list[float]
    mask: list[int]

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) // 2


@dataclass(frozen=True)
class Cost:
    """Seconds of a step."""

    waits: float
    cpu: float


def rows_of_step(num_rows: int, mean_tokens: int, seed: int = 0) -> list[Row]:
    """Return sequences of log-normal length, as lists of Python numbers."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in np.maximum(rng.lognormal(np.log(mean_tokens) - 0.32, 0.8, num_rows).astype(int), 4):
        sampled = np.arange(length) >= length // 2
        logprobs = np.where(sampled, -rng.exponential(0.5, length), 0).astype(np.float32)
        rows.append(
            Row((rng.zipf(1.2, length) % 150_000).tolist(), logprobs.tolist(), sampled.astype(int).tolist())
        )
    return rows


def measured(step: Callable[[int], object], end: Callable[[], object], steps: int) -> Cost:
    """Return the cost of a step; `end` waits for the background thread."""
    waits, begin = [], time.process_time()
    for number in range(steps):
        start = time.perf_counter()
        step(number)
        waits.append(time.perf_counter() - start)
    end()
    return Cost(statistics.median(waits), (time.process_time() - begin) / steps)


def slime_cost(rows: list[Row], steps: int, folder: Path) -> Cost:
    """Cost of slime's hook for a rollout."""
    status = Namespace(value="completed")
    samples = [
        Namespace(
            tokens=row.tokens,
            response_length=len(row.tokens) - row.prompt_length,
            loss_mask=row.mask[row.prompt_length :],
            rollout_log_probs=row.logprobs[row.prompt_length :],
            reward=1.0,
            group_index=number // 8,
            status=status,
            weight_versions=["3"],
            remove_sample=False,
            prompt="",
            response="",
        )
        for number, row in enumerate(rows)
    ]
    recording = Guarded("slime", folder)
    slime.recording_of = lambda trainer: recording
    args = Namespace(reward_key=None)
    return measured(lambda step: slime.record(step, args, samples, None, 1.0), recording.end, steps)


def prime_rl_cost(rows: list[Row], steps: int, folder: Path) -> Cost:
    """Cost of the observation of a loss, without the loss."""
    recording = Guarded("prime-rl", folder)
    noise = prime_rl.NOISE["bfloat16"]
    observed = Observation(
        recording, 0, lambda step, rows: prime_rl.compare(step, rows, noise, recording.notice)
    )
    inputs = [
        Namespace(
            loss_mask=torch.tensor(row.mask, dtype=torch.bool),
            inference_logprobs=torch.tensor(row.logprobs),
            trainer_logprobs=torch.tensor(row.logprobs),
            advantages=torch.ones(len(row.mask)),
        )
        for row in rows
    ]

    def step(number: int) -> None:
        for item in inputs:
            observed.add(item)
        observed.end_step()

    return measured(step, recording.end, steps)


def nemo_columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Return what NeMo-RL logs: lists that are padded to the longest row."""
    width = max(len(row.tokens) for row in rows)

    def padded(values: list[Any], fill: float) -> list[Any]:
        return values + [fill] * (width - len(values))

    return {
        "content": ["" for _ in rows],
        "rewards": [1.0 for _ in rows],
        "input_lengths": [len(row.tokens) for row in rows],
        "token_ids": [padded(row.tokens, 0) for row in rows],
        "token_loss_mask": [padded(row.mask, 0) for row in rows],
        "sample_loss_mask": [1.0 for _ in rows],
        "advantages": [padded([0.125] * len(row.tokens), 0.125) for row in rows],
        "generation_logprobs": [padded(row.logprobs, 0.0) for row in rows],
        "prev_logprobs": [padded(row.logprobs, 0.0) for row in rows],
    }


class Dump:
    """NeMo-RL's dump (nemo_rl/utils/logger.py): a JSON object for each slice of one row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def log_batched_dict_as_jsonl(self, to_log: dict[str, Any], filename: str) -> None:
        with open(self.folder / filename, "w") as file:
            for row in range(len(to_log["rewards"])):
                sample = {name: values[row : row + 1] for name, values in to_log.items()}
                file.write(json.dumps({**sample, "idx": row}, default=str) + "\n")

    def log_metrics(self, *facts: Any, **others: Any) -> None:
        """Take metrics, as a logger without backends."""

    def finish(self) -> None:
        """End."""


def nemo_rl_cost(rows: list[Row], steps: int, folder: Path, recorded: bool) -> Cost:
    """Cost of NeMo-RL's dump, or of the record in its place."""
    columns = nemo_columns(rows)
    folder.mkdir()
    logger: Any = Dump(folder)
    if recorded:
        logger = nemo_rl.Recorded(logger, folder / "record")

    def step(number: int) -> None:
        logger.log_batched_dict_as_jsonl(columns, f"train_data_step{number + 1}.jsonl")
        logger.log_metrics({"loss": 0.5}, number + 1, "train")

    return measured(step, logger.finish, steps)


def areal_cost(rows: list[Row], steps: int, folder: Path) -> Cost:
    """Cost of a recorded workflow, with AReaL's modules replaced by what the adapter needs."""
    names = ("areal", "areal.workflow_context", "areal.api", "areal.experimental.openai.types")
    modules = {name: types.ModuleType(name) for name in names}
    context = Namespace(task_id=None, is_eval=False)
    modules["areal"].workflow_context = modules["areal.workflow_context"]
    modules["areal.workflow_context"].get = lambda: context
    modules["areal.api"].RolloutWorkflow = object
    modules["areal.experimental.openai.types"].InteractionWithTokenLogpReward = Row
    sys.modules.update(modules)
    from areal_debug.areal import Recorded

    results = [
        {
            "input_ids": torch.tensor([row.tokens], dtype=torch.int32),
            "loss_mask": torch.tensor([row.mask], dtype=torch.int32),
            "logprobs": torch.tensor([row.logprobs]),
            "versions": torch.tensor([row.mask], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(row.tokens), dtype=torch.bool),
            "rewards": torch.ones(1),
        }
        for row in rows
    ]

    class Workflow:
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            return results[data]

    workflow = Recorded(Workflow(), folder)

    def step(number: int) -> None:
        engine = Namespace(get_version=lambda: number)

        async def episodes() -> None:
            for item in range(len(results)):
                await workflow.arun_episode(engine, item)

        asyncio.run(episodes())

    return measured(step, workflow.recording.end_with_process, steps)


def main() -> None:
    options = read_options(__doc__, rows=512, mean_tokens=2000, steps=3, folder="")
    folder = Path(tempfile.mkdtemp(dir=options.folder or None))
    rows = rows_of_step(options.rows, options.mean_tokens)
    num_tokens = sum(len(row.tokens) for row in rows)
    try:
        costs = {
            "slime": slime_cost(rows, options.steps, folder / "slime"),
            "prime-rl": prime_rl_cost(rows, options.steps, folder / "prime"),
            "AReaL": areal_cost(rows, options.steps, folder / "areal"),
            "NeMo-RL, record": nemo_rl_cost(rows, options.steps, folder / "nemo", recorded=True),
            "NeMo-RL, its dump": nemo_rl_cost(rows, options.steps, folder / "dump", recorded=False),
        }
        sizes = [
            sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / options.steps
            for path in (folder / "nemo", folder / "dump")
        ]
    finally:
        shutil.rmtree(folder)
    print(f"{len(rows)} rows, {num_tokens} tokens a step")
    for name, cost in costs.items():
        print(f"{name:20} waits {cost.waits:6.3f} s   cpu {cost.cpu:6.3f} s")
    ours, theirs = costs["NeMo-RL, record"], costs["NeMo-RL, its dump"]
    print(
        f"NeMo-RL's dump takes {theirs.waits / ours.waits:.1f} times as long, "
        f"{theirs.cpu / ours.cpu:.1f} times the CPU and {sizes[1] / sizes[0]:.1f} times the bytes"
    )
    what = f"NeMo-RL's step of {num_tokens:,} tokens, recorded by the adapter"
    report(what, "NeMo-RL's dump", "CPU s", [ours.cpu], [theirs.cpu])
    report(f"{what}, size", "NeMo-RL's dump", "MB", [sizes[0] / 1e6], [sizes[1] / 1e6])


if __name__ == "__main__":
    main()
