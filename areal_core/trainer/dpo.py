"""Direct preference optimisation: the policy's logprobs of pairs against those of a reference that stands still."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType

from torch import Tensor

from areal_core.algorithm.dpo_loss import dpo_loss
from areal_core.batch import Batch
from areal_core.config import DPOConfig
from areal_core.engine.checkpoint import save_hf
from areal_core.engine.ranks import leave_ranks
from areal_core.paths import run_folder
from areal_core.telemetry import Stats
from areal_core.trainer import build
from areal_core.trainer.pairs import (
    ROWS_PER_PAIR,
    Pair,
    build_validation,
    num_pairs,
    pairs_to_batch,
    record_batch,
    record_pairs,
)
from areal_core.trainer.recovery import Recovery


class DPOTrainer:
    """A run of direct preference optimisation on this rank, as a context manager.

    Args:
        train_dataset: pairs (`get_dataset` with type "dpo").
        valid_dataset: held-out ones; by default those of `config.valid_dataset`, if it is given.
    """

    def __init__(
        self, config: DPOConfig, train_dataset: Sequence[Pair], valid_dataset: Sequence[Pair] | None = None
    ) -> None:
        self.config = config
        self.total_steps = build.count_steps(config, len(train_dataset))
        self._cleanup = contextlib.ExitStack()
        self.ranks = build.start_process(config)
        self._cleanup.callback(leave_ranks)
        self.tokenizer = build.load_tokenizer(config)
        self.actor = build.build_engine(config.actor, self.ranks, self.total_steps)
        self.actor.granularity = ROWS_PER_PAIR
        first_policy = dataclasses.replace(config.actor, optimizer=None)
        self.reference = build.build_engine(config.ref or first_policy, self.ranks, self.total_steps)
        self.stats = Stats()
        self.loader = build.build_loader(config, self.ranks, train_dataset)
        steps_per_epoch = self.loader.steps_per_epoch
        self.saving = build.build_frequency(config.saver, self.ranks, steps_per_epoch)
        self.validation = build_validation(config, self.ranks, self.tokenizer, valid_dataset, steps_per_epoch)
        self.recovery = Recovery(config, self.ranks, steps_per_epoch)
        self.first_step = self.recovery.load(self.actor).step
        self.recovery.restore(self.loader)
        self.tracing = build.build_tracing(config, self.ranks, self.stats, continued=self.first_step > 0)
        self._cleanup.callback(self.tracing.close)

    def train(self, stop: Callable[[int], bool] = lambda step: False) -> None:
        """Train to the last step, or the first after which `stop(step)` holds; then write `checkpoints/.../default/final`.

        `stop` is asked on every rank and must answer alike.
        """
        with build.build_loggers(self.config, self.ranks, self.total_steps) as logger:
            if self.first_step == 0 and self.config.evaluator.eval_before_train:
                self.evaluate("eval-before-dpo")
            for step in range(self.first_step, self.total_steps):
                with self.stats.timing("step"), self.stats.scope("dpo"):
                    self._train_step(pairs_to_batch([pair for _, pair in self.loader.next_batch()]))
                if self.validation.frequency.is_due(step):
                    self.evaluate()
                stats = self.stats.export()
                logger.commit(step, stats)
                self.tracing.commit(step, stats)
                if self.saving.is_due(step):
                    self.save(f"globalstep{step}")
                self.recovery.save_when_due(step, step + 1, self.actor, self.loader)
                if stop(step):
                    break
        self.save("final")

    def _train_step(self, batch: Batch) -> None:
        record_batch(self.stats, batch)
        batch = self._with_reference(batch)
        with self.stats.timing("train_step"):
            result = self.actor.train_batch(batch, self._loss, num_pairs)
        self.actor.step_schedule()
        self.stats.scalar(grad_norm=result.grad_norm, lr=result.lr)

    def evaluate(self, scope: str = "eval-dpo") -> None:
        """Record the statistics of training for all held-out pairs, under `scope`; a collective."""
        with self.stats.timing("eval"), self.stats.scope(scope):
            for pairs in self.validation.batches:
                self.actor.eval_batch(self._with_reference(pairs_to_batch(pairs)), self._loss)

    def _with_reference(self, batch: Batch) -> Batch:
        with self.stats.timing("ref_logp"):
            return batch | {"ref_logp": self.reference.compute_logprobs(batch)}

    def _loss(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
        loss, details = dpo_loss(
            logprobs,
            flat["ref_logp"],
            flat["loss_mask"],
            flat["cu_seqlens"],
            beta=self.config.actor.beta,
            loss_type=self.config.actor.loss_type,
        )
        record_pairs(self.stats, details)
        return loss

    def save(self, name: str) -> None:
        """Write the model in Hugging Face format; a collective."""
        save_hf(run_folder(self.config, "checkpoints") / "default" / name, self.actor, self.tokenizer)

    def __enter__(self) -> "DPOTrainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()
