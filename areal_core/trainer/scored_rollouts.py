"""Rewards of a trained reward model: each row's score is added to its reward before the step.

The source of scored rows is around the live one, so that a record has the rewards that the step
trained on, and a replay needs no reward model:

    live rollouts ── batch ──> scores of its rows ── rewards + weight * score ──> the step

The score of a row is that of its last token. All ranks score at once, because the model is sharded.
"""

from dataclasses import dataclass

import torch

from areal_core.data.batch import Batch, sequence_lengths
from areal_core.engine.fsdp import FSDPEngine
from areal_core.rollout.source import RolloutSource, WrappedRollouts
from areal_core.telemetry.stats import Stats

SCORE = "scores.reward_model"  # key of the scores, float32 [B]
NO_ROWS = {
    "input_ids": torch.zeros(0, 1, dtype=torch.int32),
    "attention_mask": torch.zeros(0, 1, dtype=torch.bool),
}


@dataclass(frozen=True)
class RewardModel:
    """A reward model, and the factor on its scores."""

    engine: FSDPEngine
    weight: float

    def score(self, batch: Batch) -> Batch:
        """Return the batch with its scores, and the rewards as they are; a collective."""
        last = sequence_lengths(batch)[:, None] - 1  # [B, 1]
        return batch | {SCORE: self.engine.compute_values(batch).gather(1, last)[:, 0]}

    def add_scores(self, batch: Batch) -> Batch:
        """Return the batch with its scores, `weight` times these in its rewards; a collective."""
        scored = self.score(batch)
        return scored | {"rewards": scored["rewards"] + self.weight * scored[SCORE]}

    def add_scores_of_leader(self, batch: Batch | None) -> Batch | None:
        """Return `add_scores` of a batch that only rank 0 of a group has; a collective.

        Without a batch, and on the other ranks, None.
        """
        ranks = self.engine.ranks
        shared = ranks.share(batch)
        if shared is None:
            self.engine.compute_values(NO_ROWS)
            return None
        scored = self.add_scores(shared)
        return scored if ranks.is_group_leader else None


class ScoredRollouts(WrappedRollouts):
    """A `RolloutSource` whose rows are scored by a reward model.

    Args:
        sampled: the source of the rows.
        stats: records the scores under `reward_model/`.
    """

    def __init__(self, sampled: RolloutSource, model: RewardModel, stats: Stats) -> None:
        super().__init__(sampled)
        self.model, self.stats = model, stats

    def next_batch(self, step: int, version: int) -> Batch:
        """Return the next rows with their scores; a collective."""
        batch = self.sampled.next_batch(step, version)
        with self.stats.timing("reward_model"):
            batch = self.model.add_scores(batch)
        with self.stats.scope("reward_model"):
            self.stats.denominator(n_seqs=torch.ones_like(batch[SCORE], dtype=torch.bool))
            self.stats.stat("n_seqs", score=batch[SCORE])
        return batch
