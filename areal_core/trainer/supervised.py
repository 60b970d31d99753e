"""What the supervised methods share: a model on this rank, its rows in the run's order, and the loop over them."""

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from areal_core.batch import Batch
from areal_core.config import DPOConfig, RWConfig, SFTConfig
from areal_core.engine.fsdp import LossFunction
from areal_core.engine.model import load_model
from areal_core.engine.ranks import leave_ranks
from areal_core.telemetry import Stats
from areal_core.trainer import build
from areal_core.trainer.recovery import Recovery
from areal_core.trainer.saving import Saver

Rows = list[dict[str, Any]]


def never(step: int) -> bool:
    """Train to the last step."""
    return False


class SupervisedTrainer:
    """One model, its rows, and everything around its steps, as a context manager.

    A method builds what else it needs, calls `restore`, and gives `train_rows` what it does with the rows of a step.

    Args:
        train_dataset: the rows of all ranks.
        load: reads the model, as `build.build_engine` wants it.
        granularity: neighbouring rows that stay in one micro-batch.
    """

    def __init__(
        self,
        config: SFTConfig | RWConfig | DPOConfig,
        train_dataset: Sequence[dict[str, Any]],
        *,
        load: Callable[..., Any] = load_model,
        granularity: int = 1,
    ) -> None:
        self.config = config
        self.total_steps = build.count_steps(config, len(train_dataset))
        self._cleanup = contextlib.ExitStack()
        self.ranks = build.start_process(config)
        self._cleanup.callback(leave_ranks)
        self.tokenizer = build.load_tokenizer(config)
        self.actor = build.build_engine(config.actor, self.ranks, self.total_steps, load=load)
        self.actor.granularity = granularity
        self.stats = Stats(self.ranks.is_data_parallel_head)
        self.loader = build.build_loader(config, self.ranks, train_dataset)
        self.engines = {"actor": self.actor}
        steps_per_epoch = self.loader.steps_per_epoch
        self.recovery = Recovery(config, self.ranks, steps_per_epoch)
        self._cleanup.callback(self.recovery.close)
        saving = self.recovery.keep("saver", build.build_frequency(config.saver, self.ranks, steps_per_epoch))
        self.saver = Saver(config, self.engines, self.tokenizer, saving)
        self._cleanup.callback(self.saver.close)

    def restore(self) -> None:
        """Continue from the newest whole checkpoint, if the config says so."""
        self.first_step = self.recovery.load(self.engines).step
        self.recovery.restore(self.loader)
        continued = self.first_step > 0
        self.tracing = build.build_tracing(self.config, self.ranks, self.stats, continued=continued)
        self._cleanup.callback(self.tracing.close)

    def train_rows(
        self,
        scope: str,
        train_step: Callable[[Rows], None],
        stop: Callable[[int], bool],
        *,
        before: Callable[[], None] = lambda: None,
        after_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Train to the last step, or the first after which `stop(step)` holds; then write `checkpoints/.../default/final`.

        Args:
            scope: of the statistics of `train_step`.
            train_step: learns from this rank's rows of a step.
            stop: is asked on every rank and must answer alike.
            before: is called before the first step, `after_step` after each, before its statistics are written.
        """
        steps = (self.first_step, self.total_steps)
        with build.build_loggers(self.config, self.ranks, steps) as logger:
            before()
            for step in range(self.first_step, self.total_steps):
                with self.stats.timing("step"), self.stats.scope(scope):
                    train_step([row for _, row in self.loader.next_batch()])
                after_step(step)
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

    def update(self, batch: Batch, loss: LossFunction, weight: Callable[[Batch], Tensor]) -> None:
        """One optimizer step, and one of the schedule; a collective."""
        with self.stats.timing("train_step"):
            result = self.actor.train_batch(batch, loss, weight)
        self.actor.step_schedule()
        self.stats.scalar(grad_norm=result.grad_norm, lr=result.lr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()
