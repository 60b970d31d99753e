"""Count what a record holds of an agent's episodes: turns, tokens, rewards."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recorder import Record

FINISHED = ("stop", "length", "abort")


@dataclass(frozen=True)
class RolloutFacts:
    """One recorded step over all its ranks."""

    step: int
    num_prompts: int
    num_rows: int
    turns: dict[int, int]  # rows by number of model turns
    finished: dict[str, int]  # rows by finish reason of the last turn
    num_tokens: int
    num_trained: int
    mean_reward: float
    lowest_reward: float
    highest_reward: float
    prompts_of_equal_reward: int  # group normalisation makes their advantages 0
    versions: list[int]  # of weights that sampled tokens in the loss mask


def describe_step(record: Record, step: int) -> RolloutFacts:
    """Count the rows of a step."""
    recorded = record.step(step)
    batches = [recorded.batch(rank) for rank in range(record.header.num_ranks)]
    rewards = join(batches, "rewards")
    prompts = join(batches, "prompt_id")
    mask = join(batches, "loss_mask").astype(bool)
    finished = np.bincount(join(batches, "finish_reason"), minlength=len(FINISHED))
    return RolloutFacts(
        step=step,
        num_prompts=len(np.unique(prompts)),
        num_rows=len(rewards),
        turns=count([turns for batch in batches for turns in turns_of_rows(batch)]),
        finished={name: int(number) for name, number in zip(FINISHED, finished, strict=True) if number},
        num_tokens=len(mask),
        num_trained=int(mask.sum()),
        mean_reward=float(rewards.mean()),
        lowest_reward=float(rewards.min()),
        highest_reward=float(rewards.max()),
        prompts_of_equal_reward=sum(len(np.unique(rewards[prompts == p])) == 1 for p in np.unique(prompts)),
        versions=np.unique(join(batches, "versions")[mask]).tolist(),
    )


def join(batches: Sequence[dict[str, np.ndarray]], key: str) -> np.ndarray:
    """Concatenate one array of all ranks."""
    return np.concatenate([batch[key] for batch in batches])


def turns_of_rows(batch: dict[str, np.ndarray]) -> list[int]:
    bounds = batch["cu_seqlens"]
    rows = (batch["loss_mask"][a:b].astype(int) for a, b in itertools.pairwise(bounds))
    return [int((np.diff(row, prepend=0) == 1).sum()) for row in rows]


def count(values: Sequence[int]) -> dict[int, int]:
    """Return how often each value occurs, in ascending order of values."""
    return {value: values.count(value) for value in sorted(set(values))}
