"""Supervised fine-tuning: maximum likelihood of the completions of given rows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from areal_core.algorithm.alignment import segment_ids, segment_sum
from areal_core.algorithm.losses import sft_loss
from areal_core.data.batch import Batch
from areal_core.telemetry.stats import Reduce
from areal_core.trainer.batches import record_rows, rows_to_batch
from areal_core.trainer.supervised import SupervisedTrainer
from areal_core.trainer.update import num_loss_tokens


class SFTTrainer(SupervisedTrainer):
    """A run of supervised fine-tuning on this rank, as a context manager.

    Args:
        train_dataset: rows with `input_ids` and `loss_mask`, lists of int (`get_dataset` with type
            "sft"); for a vision model also with `images`, see `rows_to_batch`.
        valid_dataset: validation rows; by default those of `config.valid_dataset`, if it is set.
        source, observers, ...: as of `SupervisedTrainer`.
    """

    name = "sft"

    def to_batch(self, rows: Sequence[dict[str, Any]]) -> Batch:
        return rows_to_batch(rows, has_images=self.actor.vision is not None)

    def weight(self, batch: Batch) -> Tensor:
        """Return the number of tokens in the loss mask."""
        return num_loss_tokens(batch)

    def loss(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
        """Cross entropy, summed over the tokens in the loss mask; records its statistics."""
        mask = flat["loss_mask"].bool()
        loss, per_token, per_row = sft_loss(logprobs, mask, flat["cu_seqlens"])
        record_rows(self.stats, flat)
        self.stats.denominator(n_valid_tokens=mask, prompt_tokens=~mask)
        self.stats.stat("n_valid_tokens", Reduce.AVG_MIN_MAX, **per_token)
        self.stats.stat("n_seqs", Reduce.AVG_MIN_MAX, **per_row)
        return loss

    def results(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> dict[str, Tensor]:
        """Return the tokens in the loss mask of each row, and their mean cross entropy."""
        mask, cu_seqlens = flat["loss_mask"].bool(), flat["cu_seqlens"]
        per_token = sft_loss(logprobs, mask, cu_seqlens)[1]["loss"]
        ids, num_rows = segment_ids(cu_seqlens), len(cu_seqlens) - 1
        num_tokens = segment_sum(mask.to(per_token.dtype), ids, num_rows)
        loss = segment_sum(per_token, ids, num_rows) / num_tokens.clamp(min=1)
        return {"num_tokens": num_tokens.long(), "loss": loss}
