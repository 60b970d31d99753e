"""A step in a few numbers, cheap enough for every step: it reads step.json and the rewards."""

from collections.abc import Callable
from dataclasses import dataclass

from recorder.reader import Record


@dataclass(frozen=True)
class StepSummary:
    """A step over all ranks. `mean_reward` is None for a step without rows."""

    step: int
    version: int
    num_rows: int
    num_tokens: int
    size_bytes: int
    mean_reward: float | None


def summarise_steps(record: Record, tick: Callable[[object], None]) -> list[StepSummary]:
    """Summarise each committed step; calls `tick(step)` after each. Raises DamagedRecord."""
    summaries = []
    for number in record.steps:
        step = record.step(number)
        ranks = range(step.manifest.num_ranks)
        batches = [step.batch_entry(rank)[1] for rank in ranks]
        rewards = [reward for rank in ranks for reward in step.batch(rank, ["rewards"])["rewards"].tolist()]
        summaries.append(
            StepSummary(
                step=number,
                version=step.manifest.version,
                num_rows=sum(batch.num_rows for batch in batches),
                num_tokens=sum(batch.num_tokens for batch in batches),
                size_bytes=step.manifest.size_bytes,
                mean_reward=sum(rewards) / len(rewards) if rewards else None,
            )
        )
        tick(number)
    return summaries
