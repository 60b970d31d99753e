"""Training of a reward model: the score of the answer that was preferred shall be above that of the other."""

from collections.abc import Callable, Sequence

from torch import Tensor

from areal_core.algorithm.reward_model_loss import reward_model_loss
from areal_core.batch import Batch
from areal_core.config import RWConfig
from areal_core.engine.scores import load_score_model
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


class RWTrainer(SupervisedTrainer):
    """A run that trains a reward model on this rank, as a context manager.

    Args:
        train_dataset: pairs (`get_dataset` with type "rw").
        valid_dataset: held-out ones; by default those of `config.valid_dataset`, if it is given.
    """

    def __init__(
        self, config: RWConfig, train_dataset: Sequence[Pair], valid_dataset: Sequence[Pair] | None = None
    ) -> None:
        super().__init__(config, train_dataset, granularity=ROWS_PER_PAIR, load=load_score_model)
        self.validation = build_validation(self, valid_dataset)
        self.restore()

    def train(self, stop: Callable[[int], bool] = never) -> None:
        """Train to the last step, or the first after which `stop(step)` holds; `stop` must answer alike on every rank."""
        self.train_rows("rw", self._train_step, stop, before=self._before, after_step=self._after_step)

    def _before(self) -> None:
        if self.first_step == 0 and self.config.evaluator.eval_before_train:
            self.evaluate("eval-before-rw")

    def _after_step(self, step: int) -> None:
        if self.validation.frequency.is_due(step):
            self.evaluate()

    def _train_step(self, pairs: Sequence[Pair]) -> None:
        batch = pairs_to_batch(pairs)
        record_batch(self.stats, batch)
        self.update(batch, self._loss, num_pairs)

    def evaluate(self, scope: str = "eval-rw") -> None:
        """Record the statistics of training for all held-out pairs, under `scope`; a collective."""
        with self.stats.timing("eval"), self.stats.scope(scope):
            for pairs in self.validation.batches:
                self.actor.eval_batch(pairs_to_batch(pairs), self._loss)

    def _loss(self, scores: Tensor, flat: Batch) -> Tensor:
        loss, details = reward_model_loss(scores, flat["cu_seqlens"])
        record_pairs(self.stats, details)
        return loss
