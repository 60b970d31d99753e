"""Direct preference optimisation: the policy's logprobs of pairs against those of a reference that stands still."""

from collections.abc import Callable, Sequence

from torch import Tensor

from areal_core.algorithm.dpo_loss import dpo_loss
from areal_core.batch import Batch
from areal_core.config import DPOConfig
from areal_core.config.lora_checks import is_base_of
from areal_core.engine.fsdp import FSDPEngine
from areal_core.trainer.base_reference import BaseReference
from areal_core.trainer.build_models import build_scorer
from areal_core.trainer.pairs import (
    ROWS_PER_PAIR,
    Pair,
    build_validation,
    num_pairs,
    pairs_to_batch,
    record_batch,
    record_pairs,
)
from areal_core.trainer.supervised import SupervisedTrainer, never


class DPOTrainer(SupervisedTrainer):
    """A run of direct preference optimisation on this rank, as a context manager.

    Args:
        train_dataset: pairs (`get_dataset` with type "dpo").
        valid_dataset: held-out ones; by default those of `config.valid_dataset`, if it is given.
    """

    def __init__(
        self, config: DPOConfig, train_dataset: Sequence[Pair], valid_dataset: Sequence[Pair] | None = None
    ) -> None:
        super().__init__(config, train_dataset, granularity=ROWS_PER_PAIR)
        self.reference: FSDPEngine | BaseReference = BaseReference(self.actor)
        if not is_base_of(config.ref, config.actor):
            self.reference = build_scorer(config.ref or config.actor, self.ranks)
        self.options = config.actor
        self.validation = build_validation(self, valid_dataset)
        self.restore()

    def train(self, stop: Callable[[int], bool] = never) -> None:
        """Train to the last step, or the first after which `stop(step)` holds; `stop` must answer alike on every rank."""
        self.train_rows("dpo", self._train_step, stop, before=self._before, after_step=self._after_step)

    def _before(self) -> None:
        if self.first_step == 0 and self.config.evaluator.eval_before_train:
            self.evaluate("eval-before-dpo")

    def _after_step(self, step: int) -> None:
        if self.validation.frequency.is_due(step):
            self.evaluate()

    def _train_step(self, pairs: Sequence[Pair]) -> None:
        batch = pairs_to_batch(pairs)
        record_batch(self.stats, batch)
        self.update(self._with_reference(batch), self._loss, num_pairs)

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
            beta=self.options.beta,
            loss_type=self.options.loss_type,
        )
        record_pairs(self.stats, details)
        return loss
