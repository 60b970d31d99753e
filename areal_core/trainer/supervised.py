"""Base of the supervised methods: a model, training and validation rows, and the loop over them."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor

from areal_core.config import DPOConfig, RWConfig, SFTConfig
from areal_core.data import get_dataset
from areal_core.data.batch import Batch
from areal_core.data.read import full_batches
from areal_core.data.rows import Row
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks, leave_ranks
from areal_core.errors import ConfigError
from areal_core.telemetry.stats import Stats
from areal_core.trainer import build
from areal_core.trainer.batches import measure_rows
from areal_core.trainer.checkpointing import Frequency, Recovery, Saver
from areal_core.trainer.evaluation import (
    EvaluationResults,
    complete_model,
    evaluated_models,
    evaluated_rows,
    evaluates_only,
)
from areal_core.trainer.nonfinite import NonFiniteGuard

T = TypeVar("T")


def never(step: int) -> bool:
    """Return False: train to the last step."""
    return False


class SupervisedTrainer(ABC):
    """One model, its rows, and everything around its steps, as a context manager.

    A method defines the batch of its rows, the loss, its denominator, and the results per row; its
    constructor builds what else it needs, then calls `restore`. With an allocation of evaluation
    ('fsdp:d1|eval') there is no `actor` before `train`, which builds one for each model.

    Args:
        train_dataset: the rows of all ranks.
        valid_dataset: validation rows; by default those of `config.valid_dataset`, if it is set.

    Raises:
        ConfigError: `evaluator` requests validation, and there are no validation rows.
    """

    name: ClassVar[str]  # scope of training statistics; of validation: `eval-{name}`
    granularity: ClassVar[int] = 1  # adjacent rows that stay in one micro-batch
    load: ClassVar[Callable[..., Any]] = staticmethod(load_model)

    def __init__(
        self,
        config: SFTConfig | RWConfig | DPOConfig,
        train_dataset: Sequence[Row],
        valid_dataset: Sequence[Row] | None = None,
    ) -> None:
        self.only_evaluates = evaluates_only(config)
        if self.only_evaluates:
            actor: Any = replace(config.actor, optimizer=None, use_lora=False)
            config = replace(config, actor=actor)
        self.config = config
        self.train_dataset, self.valid_dataset = train_dataset, valid_dataset
        self.total_steps = 0 if self.only_evaluates else build.count_steps(config, len(train_dataset))
        self._cleanup = contextlib.ExitStack()
        self.ranks = build.start_process(config)
        self._cleanup.callback(leave_ranks)
        self.tokenizer = build.load_tokenizer(config)
        self.stats = Stats(self.ranks.is_group_leader)
        if self.only_evaluates:
            return
        self.actor = self._build_actor(config.actor.path)
        self.guard = NonFiniteGuard(config, {"actor": config.actor}, self.ranks, self.tokenizer, self.stats)
        self.loader = build.build_loader(config, self.ranks, train_dataset)
        self.engines = {"actor": self.actor}
        steps_per_epoch = self.loader.steps_per_epoch
        self.recovery = Recovery(config, self.ranks, steps_per_epoch)
        self._cleanup.callback(self.recovery.close)
        saving = self.recovery.keep("saver", build.build_frequency(config.saver, self.ranks, steps_per_epoch))
        self.saver = Saver(config, self.engines, self.tokenizer, saving)
        self._cleanup.callback(self.saver.close)
        self.validation = build_validation(self, valid_dataset)
        self.recovery.keep("evaluator", self.validation.frequency)

    @abstractmethod
    def to_batch(self, rows: Sequence[Row]) -> Batch:
        """Build the padded batch of this rank's rows of a step, perhaps none; a collective."""

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

    def restore(self) -> None:
        """Continue from the newest complete checkpoint, if `recover.mode` says so; a collective."""
        if self.only_evaluates:
            return
        self.first_step = self.recovery.load(self.engines).step
        self.recovery.restore(self.loader)
        continued = self.first_step > 0
        self.tracing = build.build_tracing(self.config, self.ranks, self.stats, continued=continued)
        self._cleanup.callback(self.tracing.close)

    def train(self, stop: Callable[[int], bool] = never) -> None:
        """Train to the last step, or the first after which `stop(step)` is true; write the model.

        The model is written to `checkpoints/.../default/final`. `stop` is called on every rank and
        must return the same on all. With an allocation of evaluation nothing is trained: the rows
        are measured with each model of `evaluator.checkpoints`.
        """
        if self.only_evaluates:
            self._evaluate_models()
            return
        steps = (self.first_step, self.total_steps)
        with build.build_loggers(self.config, self.ranks, steps) as logger:
            if self.first_step == 0 and self.config.evaluator.eval_before_train:
                self.evaluate(f"eval-before-{self.name}")
            self.guard.check_weights(self.engines, "before the first step")
            for step in range(self.first_step, self.total_steps):
                self._train_step(step)
                if self.validation.frequency.is_due(step):
                    self.evaluate(f"eval-{self.name}")
                stats = self.stats.export()
                logger.commit(step, stats)
                self.tracing.commit(step, stats)
                self.saver.save_when_due(step)
                self.recovery.save_when_due(step, step + 1, self.engines, self.loader)
                if stop(step):
                    break
            if self.saver.saves_last:
                self.saver.save("final")
            self.saver.finish()
            self.recovery.finish()

    def _train_step(self, step: int) -> None:
        """Train on this rank's rows of the next batch, in one optimizer step; a collective."""
        with self.stats.timing("step"), self.stats.scope(self.name):
            rows = self.loader.next_batch()
            batch = self.to_batch([row for _, row in rows])
            self.guard.verify(self.engines, step)
            with self.stats.timing("train_step"), self.tracing.memory(step):
                result = self.actor.train_batch(batch, self.loss, self.weight)
            if result.fault is not None or not result.update_successful:
                names = [f"row {number} of the run" for number, _ in rows for _ in range(self.granularity)]
                every = range(len(names))
                self.guard.skipped(
                    "actor",
                    self.actor,
                    batch,
                    self.loss,
                    self.weight,
                    step=step,
                    minibatch=0,
                    rows=every,
                    names=names,
                    fault=result.fault,
                )
            self.guard.check_weights(self.engines, f"after step {step}")
            self.actor.step_schedule()
            self.stats.scalar(
                grad_norm=result.grad_norm,
                lr=result.lr,
                update_successful=float(result.update_successful),
            )

    def evaluate(self, scope: str) -> None:
        """Record the training statistics of all validation rows under `scope`; a collective."""
        with self.stats.timing("eval"), self.stats.scope(scope):
            for rows in self.validation.batches:
                self.actor.eval_batch(self.to_batch(rows), self.loss)

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

        return measure_rows(self.actor, rows, self.to_batch, results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()


@dataclass(frozen=True)
class Validation:
    """This rank's validation rows, in equally many batches on every rank, and their timer."""

    batches: list[list[Row]]
    frequency: Frequency


def build_validation(trainer: SupervisedTrainer, rows: Sequence[Row] | None) -> Validation:
    """Build the validation of `rows`, or by default those of `config.valid_dataset`.

    Raises:
        ConfigError: `evaluator` requests validation, and there are no rows.
    """
    config = trainer.config
    if rows is None and config.valid_dataset is not None:
        rows = full_batches(
            get_dataset(config.valid_dataset, tokenizer=trainer.tokenizer), config.valid_dataset
        )
    frequency = build.build_frequency(config.evaluator, trainer.ranks, trainer.loader.steps_per_epoch)
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
