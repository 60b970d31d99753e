"""What DPO and reward models share: pairs of rows as a batch, chosen and rejected in turns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_core.batch import Batch
from areal_core.telemetry import Stats
from areal_core.trainer.rows import record_rows, rows_to_batch

Pair = dict[str, list[int]]  # a row of `get_dataset` with type "rw" or "dpo"
ROWS_PER_PAIR = 2


def pairs_to_batch(pairs: Sequence[Pair]) -> Batch:
    """Rows chosen_0, rejected_0, chosen_1, ..., padded, `loss_mask` next-token aligned; none of no pairs."""
    return rows_to_batch(
        [
            {"input_ids": pair[f"{side}_ids"], "loss_mask": pair[f"{side}_loss_mask"]}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
    )


def num_pairs(batch: Batch) -> Tensor:
    """The weight of a batch of pairs."""
    return torch.tensor(len(batch["input_ids"]) // ROWS_PER_PAIR)


def record_pairs(stats: Stats, flat: Batch, details: dict[str, Tensor]) -> None:
    """How much a packed batch holds, and the statistics [pairs] that a loss of its pairs gives."""
    record_rows(stats, flat)
    stats.denominator(n_pairs=torch.ones_like(details["loss"], dtype=torch.bool))
    stats.stat("n_pairs", **details)
