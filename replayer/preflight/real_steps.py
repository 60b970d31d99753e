"""Run real steps of a configured run on random tokens, and keep their bits.

config ─> model, trainer, batches of random tokens ─> steps ─> bits ─┬─> equal? ──> report
                               again, in other processes ────────────┘  no ─> noise floor of each parameter
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from areal_core.config import PPOConfig
from areal_core.data.batch import Batch
from areal_core.engine.determinism import environment_at_start, seed_everything
from areal_core.engine.reduction import local_of
from areal_core.rollout.source import WithoutEngine
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from recorder import Outcome, OutcomeObserver
from replayer.preflight.settings import Process
from replayer.request import without_side_effects

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


@dataclass(frozen=True)
class RunBits:
    """Result of some steps on this rank: their outcomes, and the local shards of some parameters.

    `weights` after the last step and `gradients` of its last minibatch are NumPy arrays by
    parameter name, of the requested parameters. `process` describes the rank during the steps.
    """

    outcomes: tuple[Outcome, ...]
    process: Process
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


def run_steps(config: PPOConfig, num_steps: int = 1, keep: Sequence[str] = ()) -> RunBits:
    """Run real steps on random tokens from the first weights; a collective.

    Args:
        keep: names of the parameters whose weights after the steps, and gradients, are returned.
    """
    config = without_side_effects(config)
    outcomes: list[Outcome] = []
    gradients: dict[str, np.ndarray] = {}

    def keep_gradients(trainer: PPOTrainer) -> Observer:
        def observe(event: str, **facts: Any) -> None:
            if event == "gradients":
                parameters = dict(trainer.actor.model.named_parameters())
                gradients.update({n: local_array(g) for n in keep if (g := parameters[n].grad) is not None})

        return observe

    with PPOTrainer(
        config,
        source=lambda trainer: random_rollouts(config, trainer),
        observers=[lambda trainer: OutcomeObserver(outcomes.append), keep_gradients],
        total_steps=max(config.total_train_steps or 100, num_steps),
        stop_after=num_steps - 1,
        print_steps=False,
    ) as trainer:
        trainer.train()
        parameters = dict(trainer.actor.model.named_parameters())
        weights = {name: local_array(parameters[name]) for name in keep}
        return RunBits(tuple(outcomes), process_of(trainer), weights, gradients)


def process_of(trainer: PPOTrainer) -> Process:
    options = trainer.actor.model.config.to_dict()
    return Process(
        rank=trainer.ranks.rank,
        world_size=trainer.ranks.world_size,
        device=trainer.ranks.device.type,
        now=dict(os.environ),
        at_start=environment_at_start(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        algorithms_deterministic=torch.are_deterministic_algorithms_enabled(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        num_threads=torch.get_num_threads(),
        num_cores=os.cpu_count() or 1,
        dropouts={n: v for n, v in options.items() if isinstance(v, float) and "drop" in n},
    )


def local_array(tensor: torch.Tensor) -> np.ndarray:
    return local_of(tensor).detach().float().cpu().numpy().copy()


def save_bits(bits: RunBits, folder: Path, rank: int) -> None:
    """Save the kept arrays in `folder` for the process that compares."""
    arrays = {f"weights:{name}": array for name, array in bits.weights.items()}
    arrays |= {f"gradients:{name}": array for name, array in bits.gradients.items()}
    if arrays:
        save_file(
            {n: torch.from_numpy(a) for n, a in arrays.items()}, folder / f"values-{rank:05d}.safetensors"
        )
