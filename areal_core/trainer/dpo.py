"""Direct preference optimisation: log-probs of pairs against those of a frozen reference."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from areal_core.algorithm.losses import dpo_loss
from areal_core.config import DPOConfig
from areal_core.config.servers import is_base_of
from areal_core.data.batch import Batch
from areal_core.engine.fsdp import FSDPEngine
from areal_core.trainer.batches import ROWS_PER_PAIR, Pair, num_pairs, pairs_to_batch, record_pairs
from areal_core.trainer.build_models import BaseReference, build_scorer
from areal_core.trainer.supervised import SupervisedTrainer


class DPOTrainer(SupervisedTrainer):
    """A run of direct preference optimisation on this rank, as a context manager.

    Args:
        train_dataset: pairs (`get_dataset` with type "dpo").
        valid_dataset: validation pairs; by default those of `config.valid_dataset`, if it is set.
        source, observers, ...: as of `SupervisedTrainer`.
    """

    name = "dpo"
    granularity = ROWS_PER_PAIR

    def build_more(self) -> None:
        config = self.config
        assert isinstance(config, DPOConfig)
        self.options = config.actor
        self.reference: FSDPEngine | BaseReference = (
            BaseReference(self.actor)
            if is_base_of(config.ref, config.actor)
            else build_scorer(config.ref or replace(config.actor, use_lora=False), self.ranks)
        )

    def to_batch(self, pairs: Sequence[Pair]) -> Batch:
        return pairs_to_batch(pairs)

    def inputs(self, batch: Batch) -> Batch:
        """Add the reference's `ref_logp` [B, T]; a collective."""
        aligned = super().inputs(batch)
        with self.stats.timing("ref_logp"):
            return aligned | {"ref_logp": self.reference.compute_logprobs(aligned)}

    def weight(self, batch: Batch) -> Tensor:
        """Return the number of pairs."""
        return num_pairs(batch)

    def loss(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
        """DPO loss, summed over the pairs of a packed micro-batch; records its statistics."""
        loss, details = self._loss_of_pairs(logprobs, flat)
        record_pairs(self.stats, flat, details)
        return loss

    def results(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> dict[str, Tensor]:
        """Return of each pair its loss, the margin of its rewards, and whether this is above 0."""
        details = self._loss_of_pairs(logprobs, flat)[1]
        return {
            "loss": details["loss"],
            "accuracy": details["reward_accuracy"],
            "margin": details["reward_margin"],
        }

    def _loss_of_pairs(self, logprobs: Tensor, flat: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return dpo_loss(
            logprobs,
            flat["ref_logp"],
            flat["loss_mask"],
            flat["cu_seqlens"],
            beta=self.options.beta,
            loss_type=self.options.loss_type,
        )
