"""Supervised fine-tuning: maximum likelihood of the completions of given rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_core.algorithm.alignment import shifted_left
from areal_core.algorithm.sft_loss import sft_loss
from areal_core.batch import Batch, pad_and_concat
from areal_core.config import SFTConfig
from areal_core.trainer.supervised import Rows, SupervisedTrainer, never
from areal_core.trainer.updates import trained_tokens


class SFTTrainer(SupervisedTrainer):
    """A run of supervised fine-tuning on this rank, as a context manager.

    Args:
        train_dataset: rows with `input_ids` and `loss_mask`, lists of int (`get_dataset` with type "sft").
    """

    def __init__(self, config: SFTConfig, train_dataset: Sequence[dict[str, Any]]) -> None:
        super().__init__(config, train_dataset)
        self.restore()

    def train(self, stop: Callable[[int], bool] = never) -> None:
        """Train to the last step, or the first after which `stop(step)` holds; `stop` must answer alike on every rank."""
        self.train_rows("sft", self._train_step, stop)

    def _train_step(self, rows: Rows) -> None:
        batch = rows_to_batch(rows)
        every = torch.ones(batch["attention_mask"].shape[0], dtype=torch.bool)
        self.stats.denominator(n_seqs=every, n_tokens=batch["attention_mask"])
        self.update(batch, self._loss, trained_tokens)

    def _loss(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
        loss, details = sft_loss(logprobs, flat["loss_mask"])
        self.stats.denominator(n_valid_tokens=flat["loss_mask"].bool())
        self.stats.stat("n_valid_tokens", loss=details["loss"])
        return loss


def rows_to_batch(rows: Sequence[dict[str, list[int]]]) -> Batch:
    """Rows as a padded batch, `loss_mask` next-token aligned."""
    singles = [
        {
            "input_ids": torch.tensor([row["input_ids"]], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(row["input_ids"]), dtype=torch.bool),
            "loss_mask": torch.tensor([row["loss_mask"]], dtype=torch.int32),
        }
        for row in rows
    ]
    batch = pad_and_concat(singles)
    return batch | {"loss_mask": shifted_left(batch["loss_mask"], 0)}
