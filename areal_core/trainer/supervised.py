"""Base of the supervised methods: a model, training and validation rows, and the loop over them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from areal_core.config import DPOConfig, RWConfig, SFTConfig
from areal_core.data import PromptLoader
from areal_core.data.batch import RAGGED, Batch
from areal_core.data.rows import Row
from areal_core.engine.determinism import rng_state
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks
from areal_core.engine.recompute import device_identity
from areal_core.errors import ConfigError
from areal_core.rollout.source import RolloutSource, WithoutEngine
from areal_core.trainer import build
from areal_core.trainer.batches import measure_rows, next_token_aligned
from areal_core.trainer.checkpointing import Frequency
from areal_core.trainer.evaluation import (
    EvaluationResults,
    complete_model,
    evaluated_models,
    evaluated_rows,
    evaluates_only,
    validation_rows,
)
from areal_core.trainer.nonfinite import NonFiniteGuard
from areal_core.trainer.observed import ObservedRun, Observer
from areal_core.trainer.update import record_result, train_minibatch

T = TypeVar("T")
# what a step computes with, of a batch
INPUTS = frozenset({"input_ids", "attention_mask", "loss_mask", "mm_token_type_ids", *RAGGED, "image_count"})
KEPT = INPUTS | {"prompt_id", "sample_id"}


def never(step: int) -> bool:
    """Return False: train to the last step."""
    return False


class SupervisedTrainer(ObservedRun, ABC):
    """One model, its rows, and everything around its steps, as a context manager.

    A method defines the batch of its rows, the loss, its denominator, and the results per row, and
    builds what else it needs in `build_more`. With an allocation of evaluation
    ('fsdp:d1|eval') there is no `actor` before `train`, which builds one for each model.

    Args:
        train_dataset: the rows of all ranks; not needed when `source` is given.
        valid_dataset: validation rows; by default those of `config.valid_dataset`, if it is set.
        source: builds the source of batches from the trainer, for a run without validation; by
            default batches are of `train_dataset`.
        observers, total_steps, checkpoint, stop_after, print_steps, stops_at_nonfinite, join: as of
            `PPOTrainer`.

    Raises:
        ConfigError: `evaluator` requests validation, and there are no validation rows.
    """

    name: ClassVar[str]  # scope of training statistics; of validation: `eval-{name}`
    granularity: ClassVar[int] = 1  # adjacent rows that stay in one micro-batch
    load: ClassVar[Callable[..., Any]] = staticmethod(load_model)

    def __init__(
        self,
        config: SFTConfig | RWConfig | DPOConfig,
        train_dataset: Sequence[Row] | None = None,
        valid_dataset: Sequence[Row] | None = None,
        *,
        source: Callable[[Any], RolloutSource] | None = None,
        observers: Sequence[Callable[[Any], Observer]] = (),
        total_steps: int | None = None,
        checkpoint: Path | None = None,
        stop_after: int | None = None,
        print_steps: bool = True,
        stops_at_nonfinite: bool = True,
        join: Callable[[Any], Ranks] = build.start_process,
    ) -> None:
        self.only_evaluates = evaluates_only(config)
        if self.only_evaluates:
            actor: Any = replace(config.actor, optimizer=None, use_lora=False)
            config = replace(config, actor=actor)
        self.config: SFTConfig | RWConfig | DPOConfig = config
        self.method, self.print_steps = self.name, print_steps
        self.train_dataset, self.valid_dataset = train_dataset or (), valid_dataset
        if self.only_evaluates:
            total_steps = 0
        elif total_steps is None:
            total_steps = build.count_steps(config, len(self.train_dataset))
        self.total_steps = total_steps
        self.end_step = total_steps if stop_after is None else min(total_steps, stop_after + 1)
        self._join(join, config)
        self.observers = []
        if not self.only_evaluates:
            self._build(source, stops_at_nonfinite)
        self.build_more()
        if not self.only_evaluates:
            self._restore(checkpoint)
            self._make_observers(observers)

    def _build(self, source: Callable[[Any], RolloutSource] | None, stops_at_nonfinite: bool) -> None:
        """Build what trains: the model, its source of batches, guard, recovery and validation."""
        config = self.config
        self.device_identity = device_identity(self.ranks.device)
        self.actor = self._build_actor(config.actor.path)
        self.processor = self.actor.processor
        options = {"actor": config.actor}
        self.guard = NonFiniteGuard(
            config, options, self.ranks, self.tokenizer, self.stats, stops_at_nonfinite
        )
        self.engines = {"actor": self.actor}
        steps_per_epoch = 1
        if source is not None:
            self.source: RolloutSource = source(self)
        else:
            rows = DatasetRows(build.build_loader(config, self.ranks, self.train_dataset), self)
            self.source, steps_per_epoch = rows, rows.loader.steps_per_epoch
        self._build_saving(steps_per_epoch)
        self.validation: Validation | None = None
        if source is None:
            self.validation = build_validation(self, self.valid_dataset, steps_per_epoch)
            self.recovery.keep("evaluator", self.validation.frequency)

    def build_more(self) -> None:
        """Build what the method needs besides the model, before a checkpoint is loaded."""

    @abstractmethod
    def to_batch(self, rows: Sequence[Row]) -> Batch:
        """Build the padded batch of rows, perhaps none; position t of the mask is of token t."""

    def inputs(self, batch: Batch) -> Batch:
        """Return the next-token aligned batch that the loss gets; a collective."""
        return next_token_aligned({key: value for key, value in batch.items() if key in INPUTS})

    @abstractmethod
    def weight(self, batch: Batch) -> Tensor:
        """Return the loss denominator of a batch; the loss is divided by its sum over ranks."""

    @abstractmethod
    def loss(self, *inputs: Any) -> Tensor:
        """Compute the loss, summed over a packed micro-batch; records its statistics."""

    @abstractmethod
    def results(self, *inputs: Any) -> dict[str, Tensor]:
        """Return the results [rows or pairs] of a packed micro-batch, from the inputs of `loss`."""

    def _build_actor(self, path: str) -> FSDPEngine:
        options = replace(self.config.actor, path=path)
        actor = build.build_engine(options, self.ranks, self.total_steps, load=self.load)
        actor.granularity = self.granularity
        return actor

    def _restore(self, checkpoint: Path | None) -> None:
        """Continue from the newest complete checkpoint, if `recover.mode` says so; a collective."""
        self.first_step = self.version = self.recovery.load(self.engines, checkpoint).step
        self.recovery.restore(self.source)
        self._build_tracing()

    def train(self, stop: Callable[[int], bool] = never) -> None:
        """Train to the last step, or the first after which `stop(step)` is true; write the model.

        The model is written to `checkpoints/.../default/final`. `stop` is called on every rank and
        must return the same on all. With an allocation of evaluation nothing is trained: the rows
        are measured with each model of `evaluator.checkpoints`.
        """
        if self.only_evaluates:
            self._evaluate_models()
            return
        steps, config = (self.first_step, self.total_steps), self.config
        with (
            self._start_and_end_observed(),
            build.build_loggers(config, self.ranks, steps, self.print_steps) as logger,
        ):
            if self.first_step == 0 and config.evaluator.eval_before_train:
                self.evaluate(f"eval-before-{self.name}")
            measured = self.stats.export()  # no part of the first step, which observers get
            self.guard.check_weights(self.engines, "before the first step")
            for step in range(self.first_step, self.end_step):
                with self.stats.timing("step"), self.stats.scope(self.name):
                    stats = self._train_step(step)
                if self.validation is not None and self.validation.frequency.is_due(step):
                    self.evaluate(f"eval-{self.name}")
                stats, measured = measured | stats | self.stats.export(), {}
                logger.commit(step, stats)
                self.tracing.commit(step, stats)
                self.saver.save_when_due(step)
                checkpoint = self.recovery.save_when_due(step, step + 1, self.engines, self.source)
                self._observe_checkpoint(checkpoint)
                if stop(step):
                    break
            if self.saver.saves_last:
                self.saver.save("final")
            self.saver.finish()
            self._observe_checkpoint(self.recovery.finish())

    def _train_step(self, step: int) -> dict[str, float]:
        """Train on this rank's rows of the next batch, in one optimizer step; a collective.

        Returns the statistics of the step.
        """
        given = self.source.next_batch(step, self.version)
        batch = {key: value for key, value in given.items() if key in KEPT}  # a record has more
        self._observe("batch", step=step, version=self.version, batch=batch, rng=rng_state())
        inputs = self.inputs(batch)
        self._observe("advantages", step=step, inputs=inputs)
        names = [f"row {number} of the run" for number in batch["prompt_id"].tolist()]
        self.guard.verify(self.engines, step)
        with self.stats.timing("train_step"), self.tracing.memory(step):
            result, followed = train_minibatch(
                self.actor,
                inputs,
                list(range(len(names))),
                self.loss,
                partial(self._observe, step=step),
                self.weight,
                partial(self.guard.skipped, "actor", step=step, names=names),
            )
        record_result(self.stats, result)
        self.actor.step_schedule()
        self.version += 1
        stats = self.stats.export()
        plan = {"total_steps": self.total_steps, "minibatches": [followed]}
        self._observe_step(step, plan | {"device": self.device_identity}, stats)
        self.guard.check_weights(self.engines, f"after step {step}", step)
        self._observe("weights", step=step, version=self.version)
        return stats

    def evaluate(self, scope: str) -> None:
        """Record the training statistics of all validation rows under `scope`; a collective."""
        batches = [] if self.validation is None else self.validation.batches
        with self.stats.timing("eval"), self.stats.scope(scope):
            for rows in batches:
                self.actor.eval_batch(self.inputs(self.to_batch(rows)), self.loss)

    def _evaluate_models(self) -> None:
        """Measure the rows of `evaluator` with each model, a line per row; a collective."""
        config, is_first = self.config, self.ranks.rank == 0
        models = evaluated_models(config)
        rows = evaluated_rows(config, self.train_dataset, self.valid_dataset, self.tokenizer)
        batches = shard_batches(rows, config.train_dataset.batch_size, self.ranks)
        kept = EvaluationResults(config) if is_first else None
        with build.build_loggers(config, self.ranks, (0, len(models)), print_steps=False) as logger:
            for step, path in enumerate(models):
                began_s = time.monotonic()
                if is_first:
                    print(f"{path}: {len(rows):,} rows", flush=True)
                with complete_model(path, config, self.ranks.rank) as complete:
                    self.actor = self._build_actor(complete)
                with self.stats.timing("eval"), self.stats.scope(f"eval-{self.name}"):
                    lines = [line for batch in batches for line in self._measure(batch)]
                of_ranks = self.ranks.gather_leaders(lines)
                if kept is not None:
                    every = sorted((line for of in of_ranks for line in of), key=lambda line: line["row_id"])
                    kept.add(path, every, began_s)
                logger.commit(step, self.stats.export())
                del self.actor  # before the next one is loaded
        if kept is not None:
            kept.finish(method=self.name, num_rows=len(rows))

    def _measure(self, rows: Sequence[tuple[int, Row]]) -> list[dict[str, Any]]:
        """Return the lines of this rank's rows, and record their statistics; a collective."""

        def results(*inputs: Any) -> dict[str, Tensor]:
            self.loss(*inputs)
            return self.results(*inputs)

        return measure_rows(self.actor, rows, lambda chosen: self.inputs(self.to_batch(chosen)), results)


@dataclass(frozen=True)
class DatasetRows(WithoutEngine):
    """A source of the dataset's rows: each is a prompt of its own, and a pair two samples of one."""

    loader: PromptLoader
    trainer: SupervisedTrainer

    def next_batch(self, step: int, version: int) -> Batch:
        """Return this rank's rows of the next batch; it does not depend on `step` and `version`."""
        rows, size = self.loader.next_batch(), self.trainer.granularity
        numbers = torch.tensor([number for number, _ in rows], dtype=torch.int64)
        return self.trainer.to_batch([row for _, row in rows]) | {
            "prompt_id": numbers.repeat_interleave(size),
            "sample_id": torch.arange(size, dtype=torch.int32).repeat(len(rows)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        self.loader.load_state_dict(state)


@dataclass(frozen=True)
class Validation:
    """This rank's validation rows, in equally many batches on every rank, and their timer."""

    batches: list[list[Row]]
    frequency: Frequency


def build_validation(
    trainer: SupervisedTrainer, rows: Sequence[Row] | None, steps_per_epoch: int
) -> Validation:
    """Build the validation of `rows`, or by default those of `config.valid_dataset`.

    Raises:
        ConfigError: `evaluator` requests validation, and there are no rows.
    """
    config = trainer.config
    if rows is None and config.valid_dataset is not None:
        rows = validation_rows(config, None, trainer.tokenizer)
    frequency = build.build_frequency(config.evaluator, trainer.ranks, steps_per_epoch)
    if not rows and (frequency.is_set or config.evaluator.eval_before_train):
        raise ConfigError(
            "evaluator requests validation and valid_dataset is None: set valid_dataset, or pass the trainer's argument"
        )
    return Validation(shard_batches(rows or [], config.train_dataset.batch_size, trainer.ranks), frequency)


def shard_batches(rows: Sequence[T], batch_size: int, ranks: Ranks) -> list[list[T]]:
    """Divide rows into batches; return this rank's share of each, perhaps none of the last one.

    Data-parallel rank r of n gets rows r, r + n, ... of each batch of `batch_size`.
    """
    starts = range(0, len(rows), batch_size)
    ends = [min(start + batch_size, len(rows)) for start in starts]
    return [
        [rows[i] for i in range(start + ranks.data_parallel_rank, end, ranks.data_parallel_size)]
        for start, end in zip(starts, ends, strict=True)
    ]
