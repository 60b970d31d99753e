"""Validation: other prompts and sampling options, on the rollout engine of the training prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from areal_core.batch import Batch
from areal_core.config import PPOConfig
from areal_core.dataset import get_dataset
from areal_core.dataset.read import full_batches
from areal_core.errors import ConfigError
from areal_core.rollout.live import log_scalars
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.telemetry import Reduce, Stats
from areal_core.trainer.checkpointing import Frequency
from areal_core.trainer.scored_rollouts import RewardModel


class Evaluation:
    """This rank's share of the validation rows, and the workflow that they are run through.

    Training prompts in flight continue meanwhile. The weights do not change during a validation, so
    all rows are sampled from the same version.

    Args:
        executor, workflow: None only if `rows` is empty.
        rows: (number, row) of each.
        frequency: the steps after which validation runs.
        stats: receives the rewards under `eval-rollout/`.
        n_samples: samples of each row.
        reward_model: its scores are added to the rewards.
    """

    def __init__(
        self,
        executor: Executor | None,
        rows: Sequence[tuple[int, dict[str, Any]]],
        frequency: Frequency,
        stats: Stats,
        workflow: RolloutWorkflow | None = None,
        n_samples: int = 1,
        reward_model: RewardModel | None = None,
    ) -> None:
        self.executor = executor
        self.workflow = workflow
        self.rows = rows
        self.frequency = frequency
        self.n_samples = n_samples
        self.stats = stats
        self.reward_model = reward_model

    def after_step(self, step: int) -> None:
        """Validate if it is due. Call it on every rank after every step."""
        if self.frequency.is_due(step):
            self.run()

    def run(self) -> None:
        """Sample every row `n_samples` times and record the rewards.

        A collective with a reward model. Raises the exception of an episode, as training does.
        """
        batch = None
        if self.rows:
            assert self.executor is not None
            assert self.workflow is not None
            batch = self.executor.rollout_batch(self.rows, self.workflow, n_samples=self.n_samples)
        if self.reward_model is not None:
            batch = self.reward_model.add_scores_of_leader(batch)
        if batch is not None:
            assert self.executor is not None
            log_samples(self.stats, batch, self.executor)


def log_samples(stats: Stats, batch: Batch, executor: Executor) -> None:
    """Record the rewards and lengths of validation samples, and the counts of their prompts."""
    control = executor.control
    log_scalars(stats, executor.scalars, "eval-workflow")
    with stats.scope("eval-rollout"):
        stats.denominator(n_seqs=torch.ones_like(batch["rewards"], dtype=torch.bool))
        stats.stat(
            "n_seqs",
            Reduce.AVG,
            reward=batch["rewards"],
            seq_len=batch["attention_mask"].sum(1).float(),
            no_eos_ratios=(batch["finish_reason"] == 1).float(),
        )
        stats.scalar(accepted=control.accepted, rejected=control.rejected, failed=control.failed)


def validation_rows(
    config: PPOConfig, rows: Sequence[dict[str, Any]] | None, tokenizer: PreTrainedTokenizerBase
) -> Sequence[dict[str, Any]]:
    """Return `rows`, or by default those of `config.valid_dataset`.

    Raises:
        ConfigError: there are none, although `evaluator` requests validation.
    """
    if rows is not None:
        return rows
    if config.valid_dataset is None:
        evaluator = config.evaluator
        raise ConfigError(
            f"evaluator.freq_epochs, freq_steps, freq_secs are {evaluator.freq_epochs}, {evaluator.freq_steps}, "
            f"{evaluator.freq_secs} and valid_dataset is None: set valid_dataset, pass valid_dataset to PPOTrainer, "
            f"or set the periods to null"
        )
    return full_batches(get_dataset(config.valid_dataset, tokenizer=tokenizer), config.valid_dataset)
