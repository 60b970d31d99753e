"""Validation: the same workflow, other prompts and other sampling options, on the engine that training samples from."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from areal_core.config import PPOConfig
from areal_core.dataset import get_dataset
from areal_core.errors import ConfigError
from areal_core.rollout.executor import Executor
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.telemetry import Reduce, Stats
from areal_core.trainer.frequency import Frequency


class Evaluation:
    """This rank's share of the validation rows, run through a workflow on request.

    Training prompts that are under way go on beside it. The weights do not move meanwhile, so all rows meet the same ones.

    Args:
        executor, workflow: not needed, and not asked, where there are no rows.
        rows: (number, row) of each.
        frequency: after which steps.
        stats: gets the rewards under `eval-rollout/`.
    """

    def __init__(
        self,
        executor: Executor | None,
        rows: Sequence[tuple[int, dict[str, Any]]],
        frequency: Frequency,
        stats: Stats,
        workflow: RolloutWorkflow | None = None,
        n_samples: int = 1,
    ) -> None:
        self.executor = executor
        self.workflow = workflow
        self.rows = rows
        self.frequency = frequency
        self.n_samples = n_samples
        self.stats = stats

    def after_step(self, step: int) -> None:
        """Runs if it is time to. Every rank calls it after every step."""
        if self.frequency.is_due(step):
            self.run()

    def run(self) -> None:
        """Every row once, `n_samples` times. Raises the exception of an episode, as training does."""
        if not self.rows:
            return
        assert self.executor is not None
        assert self.workflow is not None
        batch = self.executor.rollout_batch(self.rows, self.workflow, n_samples=self.n_samples)
        every = torch.ones_like(batch["rewards"], dtype=torch.bool)
        control = self.executor.control
        with self.stats.scope("eval-rollout"):
            self.stats.denominator(n_seqs=every)
            self.stats.stat(
                "n_seqs",
                Reduce.AVG,
                reward=batch["rewards"],
                seq_len=batch["attention_mask"].sum(1).float(),
                no_eos_ratios=(batch["finish_reason"] == 1).float(),
            )
            self.stats.scalar(accepted=control.accepted, rejected=control.rejected, failed=control.failed)


def validation_rows(
    config: PPOConfig, rows: Sequence[dict[str, Any]] | None, tokenizer: PreTrainedTokenizerBase
) -> Sequence[dict[str, Any]]:
    """The rows given, or those of `config.valid_dataset`.

    Raises:
        ConfigError: there are none; `evaluator` asks for them.
    """
    if rows is not None:
        return rows
    if config.valid_dataset is None:
        evaluator = config.evaluator
        raise ConfigError(
            f"evaluator.freq_epochs, freq_steps, freq_secs are {evaluator.freq_epochs}, {evaluator.freq_steps}, "
            f"{evaluator.freq_secs} and valid_dataset is None: give the section, or the argument of PPOTrainer, or set "
            f"the periods to null"
        )
    return get_dataset(config.valid_dataset, tokenizer=tokenizer)
