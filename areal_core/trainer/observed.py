"""What observers of a run see, whatever its method: its start and end, and events of each step."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from areal_core.config import config_to_dict, masked_options
from areal_core.data.processor import VisionProcessor
from areal_core.engine.checkpoint.distributed import save_checkpoint
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.ranks import Ranks
from areal_core.safety.secrets import masker
from areal_core.telemetry.stats import Stats
from areal_core.trainer import build
from areal_core.trainer.checkpointing import Recovery, Saver, step_of
from areal_core.trainer.trace_hooks import NO_TRACING, Tracing

logger = logging.getLogger(__name__)
# observer(event, **facts): the events and their facts are listed in ARCHITECTURE.md.
Observer = Callable[..., None]


class ObservedRun:
    """A run on this rank, as its observers see it.

    `engines` are the trained models by name. `method` is None for policy optimisation.
    """

    method: str | None = None
    config: Any
    train_dataset: Sequence[Any] | None
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    processor: VisionProcessor | None
    engines: dict[str, FSDPEngine]
    observers: list[Observer]
    stats: Stats
    recovery: Recovery
    saver: Saver
    takes_checksums = False
    tracing: Tracing = NO_TRACING
    first_step = version = 0

    def _join(self, join: Callable[[Any], Ranks], config: Any) -> None:
        """Set this process up as a rank of the job, and load the tokenizer; a collective."""
        self._cleanup = contextlib.ExitStack()
        self.ranks = join(config)
        self._cleanup.callback(self.ranks.leave)
        self.tokenizer = build.load_tokenizer(config)
        self.stats = Stats(self.ranks.is_group_leader, self.ranks.gather_objects)

    def _build_saving(self, steps_per_epoch: int) -> None:
        """Build what writes recovery checkpoints and models, closed with the run."""
        self.recovery = Recovery(self.config, self.ranks, steps_per_epoch)
        self._cleanup.callback(self.recovery.close)
        timer = build.build_frequency(self.config.saver, self.ranks, steps_per_epoch)
        self.recovery.keep("saver", timer)
        self.saver = Saver(self.config, self.engines, self.tokenizer, timer)
        self._cleanup.callback(self.saver.close)

    def _build_tracing(self) -> None:
        continued = self.first_step > 0
        self.tracing = build.build_tracing(self.config, self.ranks, self.stats, continued=continued)
        self._cleanup.callback(self.tracing.close)

    def _make_observers(self, factories: Sequence[Callable[[Any], Observer]]) -> None:
        """Make the observers of this rank; a collective.

        Checksums are collectives: if one rank has an observer, all ranks compute them.
        """
        self.observers = [make(self) for make in factories]
        self.takes_checksums = self.ranks.maximum(len(self.observers)) > 0

    def close(self) -> None:
        """Release processes, connections and the process group."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def checksums(self, plan: dict[str, Any] | None = None) -> dict[str, str]:
        """Return the crc32c of every trained parameter by name (a critic's: `critic.NAME`).

        A collective. A checksum is 8 hexadecimal digits. `plan`, if given, gets as `shards` one of
        all shards of each rank, by model.
        """
        found = {name: engine.all_checksums() for name, engine in self.engines.items()}
        if plan is not None:
            plan["shards"] = {name: each.shards for name, each in found.items()}
        of_critic = found["critic"].tensors if "critic" in found else {}
        return found["actor"].tensors | {f"critic.{name}": value for name, value in of_critic.items()}

    def _computed_by(self) -> dict[str, Any]:
        """Return the identity of what computes a step besides the trainer, by the option's name."""
        return {}

    @contextlib.contextmanager
    def _start_and_end_observed(self) -> Iterator[None]:
        """Send `start`, and at the end `end` with the error of the run, if any."""
        error: str | None = None
        try:
            self._observe_start()
            yield
        except BaseException as raised:
            error = masker().text(f"{type(raised).__name__}: {raised}")
            raise
        finally:
            self._observe("end", steps=self.version, error=error)

    def _observe_start(self) -> None:
        """Send `start` with what describes the run."""
        known: dict[str, Any] = {} if self.method is None else {"method": self.method}
        known |= {"num_rows": len(self.train_dataset)} if self.train_dataset else {}
        if self.config.debug.dump_rollout_data and not self.observers and self.ranks.rank == 0:
            logger.warning(
                "debug.dump_rollout_data is true and nothing records: read the config with areal_debug.wiring.wire, "
                "and give the trainer the hooks that it returns"
            )
        self._observe(
            "start",
            config=masked_options(config_to_dict(self.config)),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            data_parallel_rank=self.ranks.data_parallel_rank,
            data_parallel_size=self.ranks.data_parallel_size,
            model_path=self.config.actor.path,
            tokenizer=self.tokenizer,
            processor=self.processor,
            version=self.version,
            computed_by=self._computed_by(),
            save_checkpoint=lambda folder, step: save_checkpoint(
                folder, self.engines, {"step": step, "version": self.version}
            ),
            **known,
        )

    def _observe_step(self, step: int, plan: dict[str, Any], stats: dict[str, float]) -> None:
        """Send `step`, with checksums of the weights after it; a collective."""
        checksums = self.checksums(plan) if self.takes_checksums else {}
        self._observe("step", step=step, version=self.version, plan=plan, stats=stats, checksums=checksums)

    def _observe_checkpoint(self, completed: Path | None) -> None:
        """Send `checkpoint` if a recovery checkpoint is complete."""
        if completed is not None:
            self._observe("checkpoint", step=step_of(completed), folder=completed)

    def _observe(self, event: str, **facts: Any) -> None:
        """Send an event to every observer."""
        for observer in (*self.observers, *self.tracing.observers):
            observer(event, **facts)
