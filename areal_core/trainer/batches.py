"""Rows and pairs of rows of a dataset as batches, and the statistics of their size.

In a batch of pairs, for DPO and reward models, chosen and rejected rows alternate.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_core.algorithm.alignment import shifted_left
from areal_core.data.batch import Batch, pad_and_concat, select_rows
from areal_core.data.rows import Row
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.vision_models import image_keys
from areal_core.errors import DatasetError
from areal_core.telemetry.stats import Reduce, Stats

ROWS_PER_PAIR = 2
DIGITS = 16  # of the sha256 of a row: it names a row, and protects nothing
Pair = dict[str, list[int]]  # a row of `get_dataset` with type "rw" or "dpo"


def rows_to_batch(rows: Sequence[dict[str, Any]], has_images: bool = False) -> Batch:
    """Build a padded batch of `input_ids` and `loss_mask`; without rows its shape is [0, 1].

    Args:
        has_images: of a vision model. Rows may have `images`, a list of bytes, with
            `mm_token_type_ids`, 1 at their placeholders, and the batch has the keys of pictures.

    Raises:
        DatasetError: a row has images, and no types or a model that reads only text.
    """
    if not rows:
        return select_rows(rows_to_batch([{"input_ids": [0], "loss_mask": [0]}], has_images), [])
    singles = [
        {
            "input_ids": torch.tensor([row["input_ids"]], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(row["input_ids"]), dtype=torch.bool),
            "loss_mask": torch.tensor([row["loss_mask"]], dtype=torch.int32),
        }
        for row in rows
    ]
    batch = pad_and_concat(singles)
    images = [row.get("images", ()) for row in rows]
    if not has_images:
        if any(images):
            raise DatasetError("a row has images and actor.path is a text model: train a vision model")
        return batch
    types = torch.zeros(batch["input_ids"].shape, dtype=torch.int32)
    for kinds, row in zip(types, rows, strict=True):
        if row.get("images"):
            if "mm_token_type_ids" not in row:
                raise DatasetError(
                    "a row has images and no mm_token_type_ids: use those of its prompt's processor"
                )
            kinds[: len(row["mm_token_type_ids"])] = torch.tensor(row["mm_token_type_ids"])
    return batch | image_keys(images) | {"mm_token_type_ids": types}


def next_token_aligned(batch: Batch) -> Batch:
    """Return the batch with the mask of position t that of token t + 1, which it predicts."""
    return batch | {"loss_mask": shifted_left(batch["loss_mask"], 0)}


def record_rows(stats: Stats, flat: Batch) -> None:
    every = torch.ones_like(flat["input_ids"], dtype=torch.bool)
    stats.denominator(n_seqs=every[: len(flat["cu_seqlens"]) - 1], n_tokens=every)


def pairs_to_batch(pairs: Sequence[Pair]) -> Batch:
    """Build a padded batch of chosen_0, rejected_0, chosen_1, ...; without pairs it has no rows."""
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


def measure_rows(
    engine: FSDPEngine,
    rows: Sequence[tuple[int, Row]],
    to_batch: Callable[[Sequence[Row]], Batch],
    results: Callable[..., dict[str, Tensor]],
) -> list[dict[str, Any]]:
    """Return a line per row of this rank: its number, its sha256, and its results; a collective.

    Args:
        rows: (number, row) of each; perhaps none, if other ranks have some.
        to_batch: builds the batch; `engine.granularity` adjacent rows of it are one of `rows`.
        results: gets the inputs of a loss, and returns the results [rows] of a micro-batch.
    """
    by_number = dict(rows)
    numbers = [number for number in by_number for _ in range(engine.granularity)]
    lines: list[dict[str, Any]] = []

    def keep(*inputs: Any) -> None:
        found = {name: values.tolist() for name, values in results(*inputs).items()}
        for i, number in enumerate(inputs[-1]["prompt_id"][:: engine.granularity].tolist()):
            line = {"row_id": number, "row_sha256": row_sha256(by_number[number])}
            lines.append(line | {name: values[i] for name, values in found.items()})

    batch = to_batch([row for _, row in rows])
    engine.eval_batch(batch | {"prompt_id": torch.tensor(numbers, dtype=torch.int64)}, keep)
    return lines


def row_sha256(row: Row) -> str:
    lists = {name: value for name, value in row.items() if name.endswith(("_ids", "_mask"))}
    return hashlib.sha256(json.dumps(lists, sort_keys=True).encode()).hexdigest()[:DIGITS]
