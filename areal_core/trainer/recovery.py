"""Recovery: the checkpoint that an interrupted run continues from, and when one is written.

```
{fileroot}/checkpoints/{user}/{experiment}/{trial}/recover/
  step-000040/     the state before step 40, as `engine/checkpoint.py` writes it: the last but one
  step-000042/     the last; the previous one is removed only when a newer one is complete
  before-000099/   of an earlier run that is not continued; removed after this run's first one
```

Besides weights, optimizers, schedules and RNG states a checkpoint contains the next step, the
weight version, the state of each rank's source, and the seconds since timers were last due. It is
taken after the step's line in stats.jsonl; lines of later steps are cut off when the run continues,
and written again. `areal_core/launch/run.py` defines the values of `recover.mode`.
"""

import json
import logging
import os
import shutil
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from areal_core.config import BaseExperimentConfig
from areal_core.engine.background_save import BackgroundSave
from areal_core.engine.checkpoint import Engines, Snapshot, load_checkpoint, take_snapshot, write_snapshot
from areal_core.engine.checkpoint_file import read_checkpoint
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.errors import CheckpointError
from areal_core.engine.ranks import Ranks
from areal_core.launch.run import RECOVER_RUN
from areal_core.paths import run_folder
from areal_core.trainer.frequency import Frequency
from areal_core.trainer.sources import reshard

logger = logging.getLogger(__name__)


class Source(Protocol):
    """A rank's data source with a state, in JSON types."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        ...


@dataclass(frozen=True)
class Position:
    """The position of a run.

    Args:
        step: the next one.
        version: of the weights.
        sources: the state of each data-parallel rank's source, if known.
        timers: seconds since each was last due.
    """

    step: int = 0
    version: int = 0
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
            return Position()
        state = load_checkpoint(checkpoint, engines, with_optimizer=not self.options.no_load_optim)
        self._position = parse_position(state)
        self._rng = rng_state()  # building the source may draw random numbers
        return self._position

    def restore(self, source: Source) -> bool:
        """Restore source and timers; return whether a checkpoint was loaded.

        If so, the source does not have its weights yet.

        On another number of ranks the prompts in flight are resharded.
        """
        if self._position is None:
            return False
        if (sources := self._position.sources) is not None:
            if len(sources) != self.ranks.data_parallel_size:
                sources = reshard(sources, self.ranks.data_parallel_size)
            source.load_state_dict(sources[self.ranks.data_parallel_rank])
        for name, seconds in self._position.timers.items():
            if name in self._timers:
                self._timers[name].continue_after(seconds)
        set_rng_state(self._rng)
        return True

    def save_when_due(self, step: int, version: int, engines: Engines, source: Source) -> Path | None:
        """Take a checkpoint after `step` if one of `recover.freq_*` has passed; a collective.

        Returns:
            The checkpoint completed since the last call, if any: with `saver.mode` "async" that of an
            earlier step.

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
            except CheckpointError as error:
                found = error
            else:
                if found is not None or self.is_restart:
                    cut_stats(self._stats_file, step_of(found) if found else 0)
        found = self.ranks.gather_objects(found)[0]
        if isinstance(found, CheckpointError):
            raise found
        return found


def write_and_clear(snapshot: Snapshot, last: Path | None, given_up: threading.Event) -> None:
    """Write a checkpoint; once it is complete, rank 0 removes all but it and the previous one."""
    write_snapshot(snapshot, given_up)
    if snapshot.rank == 0:
        keep_only(snapshot.folder.parent, snapshot.folder, last)


def parse_position(state: dict[str, Any]) -> Position:
    """Parse the position in a checkpoint; records have no sources, older checkpoints no timers."""
    return Position(state["step"], state["version"], state.get("sources"), state.get("timers", {}))


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
    for entry in folder.iterdir():
        if entry not in kept:
            shutil.rmtree(entry)


def cut_stats(file: Path, first_step: int) -> None:
    """Keep the lines of steps before `first_step`, of a file that may end in an incomplete line."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] >= first_step:
            break
        kept.append(line)
    shortened = file.with_name(file.name + ".partial")
    shortened.write_text("".join(kept), encoding="utf-8")
    os.replace(shortened, file)
