"""What the supervised methods share: a model on this rank, its rows in the run's order, the held-out ones, and the loop over them."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

from torch import Tensor

from areal_core.batch import Batch
from areal_core.config import DPOConfig, RWConfig, SFTConfig
from areal_core.dataset import get_dataset
from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks, leave_ranks
from areal_core.errors import ConfigError
from areal_core.telemetry import Stats
from areal_core.trainer import build
from areal_core.trainer.frequency import Frequency
from areal_core.trainer.recovery import Recovery
from areal_core.trainer.saving import Saver

Row = dict[str, Any]


def never(step: int) -> bool:
    """Train to the last step."""
    return False


class SupervisedTrainer(ABC):
    """One model, its rows, and everything around its steps, as a context manager.

    A method says what a batch of its rows is, what it weighs and what its loss is; it builds what else it needs, then calls `restore`.

    Args:
        train_dataset: the rows of all ranks.
        valid_dataset: held-out ones; by default those of `config.valid_dataset`, if it is given.

    Raises:
        ConfigError: `evaluator` asks for validation, and there are no held-out rows.
    """

    name: ClassVar[str]  # scope of the statistics of training; those of held-out rows are under `eval-{name}`
    granularity: ClassVar[int] = 1  # neighbouring rows that stay in one micro-batch
    load: ClassVar[Callable[..., Any]] = staticmethod(load_model)

    def __init__(
        self,
        config: SFTConfig | RWConfig | DPOConfig,
        train_dataset: Sequence[Row],
        valid_dataset: Sequence[Row] | None = None,
    ) -> None:
        self.config = config
        self.total_steps = build.count_steps(config, len(train_dataset))
        self._cleanup = contextlib.ExitStack()
        self.ranks = build.start_process(config)
        self._cleanup.callback(leave_ranks)
        self.tokenizer = build.load_tokenizer(config)
        self.actor = build.build_engine(config.actor, self.ranks, self.total_steps, load=self.load)
        self.actor.granularity = self.granularity
        self.stats = Stats(self.ranks.is_data_parallel_head)
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
        """This rank's rows of a step, maybe none, as a padded batch; a collective."""

    @abstractmethod
    def weight(self, batch: Batch) -> Tensor:
        """What the loss of a batch, summed over all ranks, is divided by."""

    @abstractmethod
    def loss(self, *inputs: Any) -> Tensor:
        """The loss, summed over a packed micro-batch, as `FSDPEngine.train_batch` wants it; records its statistics."""

    def restore(self) -> None:
        """Continue from the newest whole checkpoint, if the config says so."""
        self.first_step = self.recovery.load(self.engines).step
        self.recovery.restore(self.loader)
        continued = self.first_step > 0
        self.tracing = build.build_tracing(self.config, self.ranks, self.stats, continued=continued)
        self._cleanup.callback(self.tracing.close)

    def train(self, stop: Callable[[int], bool] = never) -> None:
        """Train to the last step, or the first after which `stop(step)` holds; then write `checkpoints/.../default/final`.

        `stop` is asked on every rank and must answer alike.
        """
        steps = (self.first_step, self.total_steps)
        with build.build_loggers(self.config, self.ranks, steps) as logger:
            if self.first_step == 0 and self.config.evaluator.eval_before_train:
                self.evaluate(f"eval-before-{self.name}")
            for step in range(self.first_step, self.total_steps):
                self._train_step()
                if self.validation.frequency.is_due(step):
                    self.evaluate(f"eval-{self.name}")
                stats = self.stats.export()
                logger.commit(step, stats)
                self.tracing.commit(step, stats)
                self.saver.save_when_due(step)
                self.recovery.save_when_due(step, step + 1, self.engines, self.loader)
                if stop(step):
                    break
            self.saver.save("final")
            self.saver.finish()
            self.recovery.finish()

    def _train_step(self) -> None:
        with self.stats.timing("step"), self.stats.scope(self.name):
            batch = self.to_batch([row for _, row in self.loader.next_batch()])
            with self.stats.timing("train_step"):
                result = self.actor.train_batch(batch, self.loss, self.weight)
            self.actor.step_schedule()
            self.stats.scalar(grad_norm=result.grad_norm, lr=result.lr)

    def evaluate(self, scope: str) -> None:
        """Record the statistics of training for all held-out rows, under `scope`; a collective."""
        with self.stats.timing("eval"), self.stats.scope(scope):
            for rows in self.validation.batches:
                self.actor.eval_batch(self.to_batch(rows), self.loss)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()


@dataclass(frozen=True)
class Validation:
    """This rank's share of the held-out rows, as many batches on every rank, and after which steps they are run."""

    batches: list[list[Row]]
    frequency: Frequency


def build_validation(trainer: SupervisedTrainer, rows: Sequence[Row] | None) -> Validation:
    """The rows given, or those of `config.valid_dataset`, in batches of the size of training ones.

    Raises:
        ConfigError: `evaluator` asks for validation, and there are no rows.
    """
    config = trainer.config
    if rows is None and config.valid_dataset is not None:
        rows = get_dataset(config.valid_dataset, tokenizer=trainer.tokenizer)
    frequency = build.build_frequency(config.evaluator, trainer.ranks, trainer.loader.steps_per_epoch)
    if not rows and (frequency.is_set or config.evaluator.eval_before_train):
        raise ConfigError(
            "evaluator asks for validation and valid_dataset is None: give the section, or the trainer's argument"
        )
    return Validation(deal(rows or [], config.train_dataset.batch_size, trainer.ranks), frequency)


def deal(rows: Sequence[Row], batch_size: int, ranks: Ranks) -> list[list[Row]]:
    """Data-parallel rank r's rows r, r + their number, ... of each batch of `batch_size`; of the last one maybe none."""
    starts = range(0, len(rows), batch_size)
    ends = [min(start + batch_size, len(rows)) for start in starts]
    return [
        [rows[i] for i in range(start + ranks.data_parallel_rank, end, ranks.data_parallel_size)]
        for start, end in zip(starts, ends, strict=True)
    ]
