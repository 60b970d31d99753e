"""Rows of datasets as batches, and the statistics of their size."""

from collections.abc import Sequence

import torch

from areal_core.algorithm.alignment import shifted_left
from areal_core.batch import Batch, pad_and_concat, select_rows
from areal_core.telemetry import Stats


def rows_to_batch(rows: Sequence[dict[str, list[int]]]) -> Batch:
    """Build a padded batch of `input_ids` and `loss_mask`, the latter next-token aligned.

    Without rows its shape is [0, 1].
    """
    if not rows:
        return select_rows(rows_to_batch([{"input_ids": [0], "loss_mask": [0]}]), [])
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


def record_rows(stats: Stats, flat: Batch) -> None:
    """Record the numbers of sequences and tokens of a packed batch."""
    every = torch.ones_like(flat["input_ids"], dtype=torch.bool)
    stats.denominator(n_seqs=every[: len(flat["cu_seqlens"]) - 1], n_tokens=every)
