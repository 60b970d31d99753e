"""What DPO and reward models share: pairs of rows as a batch, chosen and rejected in turns, and the held-out ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_core.batch import Batch, select_rows
from areal_core.dataset import get_dataset
from areal_core.engine.ranks import Ranks
from areal_core.errors import ConfigError
from areal_core.telemetry import Stats
from areal_core.trainer.build import build_frequency
from areal_core.trainer.frequency import Frequency
from areal_core.trainer.sft import rows_to_batch
from areal_core.trainer.supervised import SupervisedTrainer

Pair = dict[str, list[int]]  # a row of `get_dataset` with type "rw" or "dpo"
ROWS_PER_PAIR = 2
NO_ROWS = select_rows(rows_to_batch([{"input_ids": [0], "loss_mask": [0]}]), [])


def pairs_to_batch(pairs: Sequence[Pair]) -> Batch:
    """Rows chosen_0, rejected_0, chosen_1, ..., padded, `loss_mask` next-token aligned; none of no pairs."""
    rows = [
        {"input_ids": pair[f"{side}_ids"], "loss_mask": pair[f"{side}_loss_mask"]}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    return rows_to_batch(rows) if rows else NO_ROWS


def num_pairs(batch: Batch) -> Tensor:
    """The weight of a batch of pairs."""
    return torch.tensor(len(batch["input_ids"]) // ROWS_PER_PAIR)


def record_batch(stats: Stats, batch: Batch) -> None:
    """How much a step learns from."""
    every = torch.ones(len(batch["input_ids"]), dtype=torch.bool)
    stats.denominator(n_seqs=every, n_tokens=batch["attention_mask"])


def record_pairs(stats: Stats, details: dict[str, Tensor]) -> None:
    """The statistics [pairs] that a loss of pairs gives."""
    stats.denominator(n_pairs=torch.ones_like(details["loss"], dtype=torch.bool))
    stats.stat("n_pairs", **details)


@dataclass(frozen=True)
class Validation:
    """This rank's share of the held-out pairs, as many batches on every rank, and after which steps they are run."""

    batches: list[list[Pair]]
    frequency: Frequency


def build_validation(trainer: SupervisedTrainer, pairs: Sequence[Pair] | None) -> Validation:
    """The pairs given, or those of `config.valid_dataset`, in batches of the size of training ones.

    Raises:
        ConfigError: `evaluator` asks for validation, and there are no pairs.
    """
    config = trainer.config
    if pairs is None and config.valid_dataset is not None:
        pairs = get_dataset(config.valid_dataset, tokenizer=trainer.tokenizer)
    frequency = build_frequency(config.evaluator, trainer.ranks, trainer.loader.steps_per_epoch)
    trainer.recovery.keep("evaluator", frequency)
    if not pairs and (frequency.is_set or config.evaluator.eval_before_train):
        raise ConfigError(
            "evaluator asks for validation and valid_dataset is None: give the section, or the trainer's argument"
        )
    return Validation(deal(pairs or [], config.train_dataset.batch_size, trainer.ranks), frequency)


def deal(pairs: Sequence[Pair], batch_size: int, ranks: Ranks) -> list[list[Pair]]:
    """Data-parallel rank r's pairs r, r + their number, ... of each batch of `batch_size`; of the last one maybe none."""
    starts = range(0, len(pairs), batch_size)
    ends = [min(start + batch_size, len(pairs)) for start in starts]
    return [
        [pairs[i] for i in range(start + ranks.data_parallel_rank, end, ranks.data_parallel_size)]
        for start, end in zip(starts, ends, strict=True)
    ]
