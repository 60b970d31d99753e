"""Training of a reward model: of a pair, the chosen answer is trained to score higher."""

from collections.abc import Sequence

from torch import Tensor

from areal_core.algorithm.losses import reward_model_loss
from areal_core.data.batch import Batch
from areal_core.engine.scores import load_score_model
from areal_core.trainer.batches import ROWS_PER_PAIR, Pair, num_pairs, pairs_to_batch, record_pairs
from areal_core.trainer.supervised import SupervisedTrainer


class RWTrainer(SupervisedTrainer):
    """A run that trains a reward model on this rank, as a context manager.

    Args:
        train_dataset: pairs (`get_dataset` with type "rw").
        valid_dataset: validation pairs; by default those of `config.valid_dataset`, if it is set.
        source, observers, ...: as of `SupervisedTrainer`.
    """

    name = "rw"
    granularity = ROWS_PER_PAIR
    load = staticmethod(load_score_model)

    def to_batch(self, pairs: Sequence[Pair]) -> Batch:
        return pairs_to_batch(pairs)

    def weight(self, batch: Batch) -> Tensor:
        """Return the number of pairs."""
        return num_pairs(batch)

    def loss(self, scores: Tensor, flat: Batch) -> Tensor:
        """Ranking loss, summed over the pairs of a packed micro-batch; records its statistics."""
        loss, details = reward_model_loss(scores, flat["cu_seqlens"])
        record_pairs(self.stats, flat, details)
        return loss

    def results(self, scores: Tensor, flat: Batch) -> dict[str, Tensor]:
        """Return of each pair its loss, the margin of its scores, and whether this is above 0."""
        details = reward_model_loss(scores, flat["cu_seqlens"])[1]
        margin = details["pos_score"] - details["neg_score"]
        return {"loss": details["loss"], "accuracy": details["correct_ratio"], "margin": margin}
