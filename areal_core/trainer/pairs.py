"""Pairs of rows as a batch, for DPO and reward models: chosen and rejected rows alternate."""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_core.batch import Batch
from areal_core.telemetry import Reduce, Stats
from areal_core.trainer.rows import record_rows, rows_to_batch

Pair = dict[str, list[int]]  # a row of `get_dataset` with type "rw" or "dpo"
ROWS_PER_PAIR = 2


def pairs_to_batch(pairs: Sequence[Pair]) -> Batch:
    """Build a padded batch of chosen_0, rejected_0, chosen_1, ..., `loss_mask` next-token aligned.

    Without pairs it has no rows.
    """
    return rows_to_batch(
        [
            {"input_ids": pair[f"{side}_ids"], "loss_mask": pair[f"{side}_loss_mask"]}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
    )


def num_pairs(batch: Batch) -> Tensor:
    """Return the number of pairs of a batch: its loss denominator."""
    return torch.tensor(len(batch["input_ids"]) // ROWS_PER_PAIR)


def record_pairs(stats: Stats, flat: Batch, details: dict[str, Tensor]) -> None:
    """Record the size of a packed batch, and the statistics [pairs] of the loss of its pairs."""
    record_rows(stats, flat)
    stats.denominator(n_pairs=torch.ones_like(details["loss"], dtype=torch.bool))
    stats.stat("n_pairs", Reduce.AVG_MIN_MAX, **details)
