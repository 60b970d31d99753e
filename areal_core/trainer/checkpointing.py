"""Checkpoints of a run, to continue it from, and its models in Hugging Face format.

```
{fileroot}/checkpoints/{user}/{experiment}/{trial}/
  recover/
    step-000040/          the state before step 40 (`engine/checkpoint`): the last but one
    step-000042/          the last; the previous one is removed only when a newer one is complete
    before-000099/        of an earlier run that is not continued; removed after this run's first one
  default/globalstep41/   the policy, or the only model, after step 41
  critic/globalstep41/    another model that the run trains
```

`Recovery` writes and loads the first. Besides weights, optimizers, schedules and RNG states such a
checkpoint contains the next step, the weight version, the state of each rank's source, and the
seconds since timers were last due. It is taken after the step's line in stats.jsonl; lines of later
steps are cut off when the run continues, and written again. On another number of ranks the states
of the sources are resharded: no prompt is lost or repeated. `areal_core/launch/run.py` defines the
values of `recover.mode`.

`Saver` writes the models. Both follow a `Frequency`: every so many steps, epochs or seconds,
whichever comes first.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from transformers import PreTrainedTokenizerBase

from areal_core.config import BaseExperimentConfig
from areal_core.data.loader import PromptOrder
from areal_core.engine.checkpoint.background_save import BackgroundSave
from areal_core.engine.checkpoint.distributed import (
    Engines,
    Snapshot,
    load_checkpoint,
    take_snapshot,
    write_snapshot,
)
from areal_core.engine.checkpoint.files import DAMAGED, read_checkpoint
from areal_core.engine.checkpoint.hf_folder import HFFolder, take_hf
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.optimizer import set_base_lr
from areal_core.engine.ranks import Ranks
from areal_core.errors import CheckpointError, CheckpointNotWritten, DatasetError, EngineError
from areal_core.launch.run import RECOVER_RUN
from areal_core.paths import run_folder
from areal_core.rollout.source import RolloutSource
from areal_core.safety.durable import commit_file, disk_errors_as_warnings, remove_folder, sentence_of

State = dict[str, Any]  # of a rank's data source, as JSON types
logger = logging.getLogger(__name__)


@dataclass
class Frequency:
    """A timer that is due after a step if one of its periods has ended.

    Args:
        epochs, steps, seconds: the periods; None for an unused one.
        steps_per_epoch: training steps in one pass over the data.
        agree: returns the maximum of a number over all ranks, because clocks differ; a collective,
            called only if `seconds` is set.
        clock: returns seconds.
    """

    epochs: int | None
    steps: int | None
    seconds: float | None
    steps_per_epoch: int
    agree: Callable[[int], int] = lambda number: number
    clock: Callable[[], float] = time.monotonic
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.clock()

    @property
    def is_set(self) -> bool:
        """Whether any period is set: without one the timer is never due."""
        return any((self.epochs, self.steps, self.seconds))

    def is_due(self, step: int) -> bool:
        """Return whether the timer is due after `step` (from 0).

        A collective if `seconds` is set: call it on every rank, once per step.
        """
        done = step + 1
        due = bool(self.steps and done % self.steps == 0)
        due = due or bool(self.epochs and done % (self.epochs * self.steps_per_epoch) == 0)
        if self.seconds:
            late = self.agree(int(self.clock() - self._last >= self.seconds))
            due = due or bool(late)
        if due:
            self._last = self.clock()
        return due

    def elapsed_s(self) -> float:
        """Return the seconds since the timer was last due, or since the start of the run."""
        return self.clock() - self._last

    def continue_after(self, elapsed_s: float) -> None:
        self._last = self.clock() - elapsed_s


@dataclass(frozen=True)
class Position:
    """The position of a run.

    Args:
        step: the next one.
        version: of the weights.
        sources: the state of each data-parallel rank's source, if known: not of a record.
        timers: seconds since each was last due; older checkpoints have none.
    """

    step: Annotated[int, msgspec.Meta(ge=0)]
    version: int
    sources: list[dict[str, Any]] | None = None
    timers: dict[str, float] = field(default_factory=dict)


class Recovery:
    """Writes recovery checkpoints and continues from one, on every rank.

    Args:
        steps_per_epoch: training steps in one pass over the data.
    """

    def __init__(self, config: BaseExperimentConfig, ranks: Ranks, steps_per_epoch: int) -> None:
        self.mode = config.recover.mode
        self.options = config.recover
        self.is_async = config.saver.mode == "async"
        self.is_restart = os.environ.get(RECOVER_RUN) == "1"
        self.folder = run_folder(config, "checkpoints") / "recover"
        self.ranks = ranks
        self._stats_file = run_folder(config, "logs") / "stats.jsonl"
        periods = (config.recover.freq_epochs, config.recover.freq_steps, config.recover.freq_secs)
        self._timers: dict[str, Frequency] = {}
        self._frequency = self.keep("recover", Frequency(*periods, steps_per_epoch, ranks.maximum))
        self._position: Position | None = None
        self._rng: dict[str, str] = {}
        self._last: Path | None = None
        self._loaded = Path()
        self._writing = BackgroundSave()

    def keep(self, name: str, timer: Frequency) -> Frequency:
        """Add `timer` to the state in checkpoints, and return it."""
        self._timers[name] = timer
        return timer

    def load(self, engines: Engines, checkpoint: Path | None = None) -> Position:
        """Load the engines' state from a checkpoint, if any; return the position; a collective.

        Args:
            checkpoint: the one to start from, which turns recovery off; None to follow
                `recover.mode`.

        Raises:
            CheckpointError: the checkpoint cannot be read, or `recover.mode` is "resume" and there
                is none.
        """
        if checkpoint is not None:
            self.mode = "disabled"
        elif self.mode not in ("disabled", "off"):
            checkpoint = self._last = self._agree_on_checkpoint()
        if checkpoint is None:
            return Position(0, 0)
        self._loaded = checkpoint
        with state_of(checkpoint):
            schedules = {name: engine.schedule for name, engine in engines.items() if engine.schedule}
            own_lr = {name: float(schedule.base_lrs[0]) for name, schedule in schedules.items()}
            state = load_checkpoint(checkpoint, engines, with_optimizer=not self.options.no_load_optim)
            self._position = msgspec.convert(state, Position)
            for name, schedule in schedules.items():
                set_base_lr(schedule, own_lr[name])
        self._rng = rng_state()  # building the source may draw random numbers
        return self._position

    def restore(self, source: RolloutSource) -> bool:
        """Restore source and timers; return whether a checkpoint was loaded.

        If so, the source does not have its weights yet.

        On another number of ranks the prompts in flight are resharded.
        """
        if self._position is None:
            return False
        with state_of(self._loaded):
            if (sources := self._position.sources) is not None:
                if len(sources) != self.ranks.data_parallel_size:
                    sources = reshard(sources, self.ranks.data_parallel_size)
                source.load_state_dict(sources[self.ranks.data_parallel_rank])
            for name, seconds in self._position.timers.items():
                if name in self._timers:
                    self._timers[name].continue_after(seconds)
        set_rng_state(self._rng)
        return True

    def save_when_due(self, step: int, version: int, engines: Engines, source: RolloutSource) -> Path | None:
        """Take a checkpoint after `step` if one of `recover.freq_*` has passed; a collective.

        Returns:
            The checkpoint completed since the last call, if any: with `saver.mode` "async" that of
            an earlier step.

        Raises:
            CheckpointNotWritten: that one could not be written.
        """
        completed = self._writing.finished()
        if self.mode in ("disabled", "off") or not self._frequency.is_due(step):
            return completed
        completed = self._writing.wait() or completed  # written one at a time, in order
        folder = self.folder / f"step-{step + 1:06d}"
        position = {
            "step": step + 1,
            "version": version,
            "sources": self.ranks.gather_rows(source.state_dict()),
            "timers": {name: timer.elapsed_s() for name, timer in self._timers.items()},
        }
        with_optimizer = not self.options.no_save_optim
        snapshot = take_snapshot(folder, engines, position, with_optimizer=with_optimizer, copy=self.is_async)
        self._writing.start(folder, partial(write_and_clear, snapshot, self._last))
        self._last = folder
        return completed if self.is_async else self._writing.wait()

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written and return it, if any.

        Call it after the last step.
        """
        return self._writing.wait()

    def close(self) -> None:
        """Abandon a checkpoint that is being written, unless `finish` has waited for it."""
        self._writing.close()

    def _agree_on_checkpoint(self) -> Path | None:
        """Return the checkpoint to continue from, the same on every rank; a collective.

        Rank 0 finds it, and cuts off the statistics of the steps that are repeated.
        """
        found: Path | CheckpointError | None = None
        if self.ranks.rank == 0:
            try:
                found = find_checkpoint(self.folder, self.mode, self.is_restart)
                if found is not None:
                    cut_stats(self._stats_file, step_of(found))
            except CheckpointError as error:
                found = error
            except OSError as error:
                found = CheckpointNotWritten(f"cannot continue the run: {sentence_of(error)}")
        found = self.ranks.gather_objects(found)[0]
        if isinstance(found, CheckpointError):
            raise found
        return found


def write_and_clear(snapshot: Snapshot, last: Path | None, given_up: threading.Event) -> None:
    """Write a checkpoint; once it is complete, rank 0 removes all but it and the previous one."""
    write_snapshot(snapshot, given_up)
    if snapshot.rank == 0:
        keep_only(snapshot.folder.parent, snapshot.folder, last)


@contextmanager
def state_of(checkpoint: Path) -> Iterator[None]:
    """Raise CheckpointError where the state in a checkpoint is none that this version writes."""
    try:
        yield
    except (EngineError, DatasetError):
        raise
    except DAMAGED as error:
        raise CheckpointError(
            f"{checkpoint} has a state that cannot be taken ({type(error).__name__}: {error}): use another one"
        ) from error


def find_checkpoint(folder: Path, mode: str, is_restart: bool) -> Path | None:
    """Return the newest complete checkpoint if `mode` continues from one; log those skipped.

    Raises:
        CheckpointError: `mode` is "resume" and there is none.
    """
    if mode == "fault" and not is_restart:
        set_aside(folder)
        return None
    for checkpoint in sorted(folder.glob("step-*[0-9]"), key=step_of, reverse=True):
        try:
            read_checkpoint(checkpoint)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
        else:
            logger.info("continuing at step %d from %s", step_of(checkpoint), checkpoint)
            return checkpoint
    if mode == "resume":
        raise CheckpointError(
            f"recover.mode is 'resume' and {folder} has no complete checkpoint: use 'auto' to start from the beginning"
        )
    return None


def step_of(checkpoint: Path) -> int:
    """Return the step before which a checkpoint was taken, from its name."""
    return int(checkpoint.name.rpartition("-")[2])


def set_aside(folder: Path) -> None:
    """Rename the checkpoints of an earlier run: those of this run may have lower numbers."""
    for checkpoint in folder.glob("step-*[0-9]"):
        aside = folder / f"before-{step_of(checkpoint):06d}"
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)


def keep_only(folder: Path, *kept: Path | None) -> None:
    """Remove the other checkpoints, and the remains of incomplete ones."""
    # deterministic: removes every other entry
    for entry in folder.iterdir():
        if entry not in kept:
            with disk_errors_as_warnings("an older checkpoint is not removed"):
                remove_folder(entry)


def cut_stats(file: Path, first_step: int) -> None:
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] >= first_step:
            break
        kept.append(line)
    commit_file(file, "".join(kept))


def reshard(states: list[State], num_ranks: int) -> list[State]:
    """Return the states of `num_ranks` sources, from those of all data-parallel ranks of a run.

    The sources of replays have no state. The state of a loader is the same on all ranks. With live
    rollouts some ranks may be ahead, and all have prompts in flight: the prompts that the run has
    not trained on yet are distributed round-robin, in the run's order.
    """
    if not states[0]:
        return [{}] * num_ranks
    if "loader" not in states[0]:
        return [states[0]] * num_ranks
    loaders = [state["loader"] for state in states]
    most = max(loader["num_batches"] for loader in loaders)
    order = PromptOrder(**{name: value for name, value in loaders[0].items() if name != "num_batches"})
    waiting = {prompt_id for state in states for prompt_id in state["prompts"]}
    for rank, loader in enumerate(loaders):
        for batch in range(loader["num_batches"], most):
            waiting.update(order.prompt_ids(batch)[rank :: len(loaders)])
    counts = [state.get("counts", {}) for state in states]
    return [
        {
            "loader": loaders[0] | {"num_batches": most},
            "prompts": sorted(waiting)[rank::num_ranks],
            "counts": {
                name: (total := sum(each[name] for each in counts)) // num_ranks + (rank < total % num_ranks)
                for name in counts[0]
            },
        }
        for rank in range(num_ranks)
    ]


class Saver:
    """Writes models, on every rank; with `saver.mode` "async" in a thread of rank 0."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        engines: Engines,
        tokenizer: PreTrainedTokenizerBase,
        frequency: Frequency,
    ) -> None:
        self.folder = run_folder(config, "checkpoints")
        self.is_async, self.saves_last = config.saver.mode == "async", config.saver.save_last
        self.engines, self.tokenizer, self.frequency = engines, tokenizer, frequency
        self._last_step: int | None = None
        self._writing = BackgroundSave()

    def save_when_due(self, step: int) -> None:
        """Write the models after `step` if one of `saver.freq_*` has passed; a collective.

        Raises the error of writing the previous ones, if there was one.
        """
        self._writing.finished()
        if self.frequency.is_due(step):
            self._last_step = step
            self.save(f"globalstep{step}")

    def save_last(self, step: int) -> None:
        """Write the models after the run's last `step`, if not yet written; a collective.

        With `saver.save_last` false none are written then.
        """
        if self.saves_last and self._last_step != step:
            self.save(f"globalstep{step}")

    def save(self, name: str) -> None:
        """Write the models to folders of that name; a collective."""
        self._writing.wait()
        folders = [
            take_hf(self.folder / ("default" if model == "actor" else model) / name, engine, self.tokenizer)
            for model, engine in self.engines.items()
        ]
        self._writing.start(self.folder, partial(write_all, folders))
        if not self.is_async:
            self._writing.wait()

    def finish(self) -> None:
        """Wait for the models that are being written."""
        self._writing.wait()

    def close(self) -> None:
        """End the writing thread, if there is one."""
        self._writing.close()


def write_all(folders: list[HFFolder], given_up: threading.Event) -> None:
    """Write the models, unless `given_up` is set."""
    for folder in folders:
        if not given_up.is_set():
            folder.write()
