"""Batches of random tokens in the shape of a config."""

import numpy as np
import torch

from areal_core.config import PPOConfig
from areal_core.data.batch import Batch
from areal_core.engine.determinism import seed_everything
from areal_core.trainer.rl import PPOTrainer
from replayer.source import WithoutEngine

LONGEST = 512  # tokens of a row: enough to fill kernels, few enough to be fast


class RandomRollouts(WithoutEngine):
    """A source of random tokens in the shape of a config; equal bits for equal seeds.

    Args:
        vocab_size: upper bound of the tokens, exclusive.
        num_prompts, num_samples: of this rank, per step.
        longest: tokens of the longest row; a quarter of each row is its prompt.
        rank: data-parallel rank.
    """

    def __init__(
        self, vocab_size: int, num_prompts: int, num_samples: int, longest: int, seed: int = 0, rank: int = 0
    ) -> None:
        self.vocab_size, self.num_prompts, self.num_samples = vocab_size, num_prompts, num_samples
        self.longest, self.seed, self.rank = max(longest, 4), seed, rank

    def next_batch(self, step: int, version: int) -> Batch:
        """Return rows [num_prompts x num_samples, longest]; also seeds the trainer."""
        seed_everything(self.seed + step, self.rank)
        rng = np.random.default_rng([self.seed, step, self.rank])
        num_rows = self.num_prompts * self.num_samples
        lengths = rng.integers(max(3, self.longest // 2), self.longest + 1, num_rows)
        position = np.arange(lengths.max())
        mask = position < lengths[:, None]
        trained = mask & (position >= (lengths // 4)[:, None])
        batch = {
            "input_ids": np.where(mask, rng.integers(0, self.vocab_size, mask.shape), 0).astype(np.int32),
            "attention_mask": mask,
            "loss_mask": trained.astype(np.int32),
            "logprobs": np.where(trained, -rng.exponential(2.0, mask.shape), 0).astype(np.float32),
            "versions": np.where(trained, version, np.where(mask, -1, 0)).astype(np.int32),
            "rewards": rng.random(num_rows, np.float32),
            "prompt_id": np.repeat(np.arange(self.num_prompts), self.num_samples)
            + self.rank * self.num_prompts,
            "sample_id": np.tile(np.arange(self.num_samples, dtype=np.int32), self.num_prompts),
            "finish_reason": np.zeros(num_rows, np.int32),
        }
        return {name: torch.from_numpy(array) for name, array in batch.items()}


def random_rollouts(config: PPOConfig, trainer: PPOTrainer) -> RandomRollouts:
    """Build random rollouts of the size that a rank gets in this run."""
    ranks = trainer.ranks
    limit = config.actor.mb_spec.max_tokens_per_mb or LONGEST
    return RandomRollouts(
        trainer.actor.model.config.vocab_size,
        max(1, config.train_dataset.batch_size // ranks.data_parallel_size),
        config.gconfig.n_samples,
        min(LONGEST, limit, (config.train_dataset.max_length or LONGEST) + config.gconfig.max_new_tokens),
        config.seed,
        ranks.data_parallel_rank,
    )
