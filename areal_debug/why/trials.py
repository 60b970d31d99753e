"""Steps run again to prove or refute a cause: with another option, by another commit, unchanged.

Every trial runs in processes of its own, so that a failure of one leaves the answer as it was: it
returns None, and the evidence says what could not be tried. They are forks of one process that has
imported torch, which starts with the first trial.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from areal_core.launch.warm import WarmRanks
from areal_debug.render import QUIET
from areal_debug.replay.ranks import ON_RANK, replay_ranks
from recorder import Record, open_record
from replayer.request import Request, request_text
from replayer.stages import STAGES, StageDifference, compare_steps


@dataclass
class Runner:
    """Runs steps of records again: a folder for what they write, and the model, if it has moved.

    `cleanup` ends the processes; without `kept` they share nothing with those of other commands.
    """

    folder: Path
    cleanup: ExitStack
    model: str | None = None

    @cached_property
    def ranks(self) -> WarmRanks:
        """The process whose forks run the trials."""
        return self.cleanup.enter_context(replay_ranks())

    def replay_all(self, record: Record) -> Record | None:
        """Replay every step of a record and return the record of that, None if it fails."""
        return self.replay_steps(record, record.steps[0], record.steps[-1])

    def replay(
        self, record: Record, step: int, settings: Sequence[str] = (), apart: bool = False
    ) -> Record | None:
        """Replay from the nearest anchor up to a step; None if it fails.

        Args:
            apart: by a new interpreter, as forks of one process have the same layout of memory.
        """
        if not apart:
            return self.replay_steps(record, step, step, settings)
        with ExitStack() as cleanup:
            return Runner(self.folder, cleanup, self.model).replay_steps(record, step, step, settings)

    def replay_steps(
        self, record: Record, first: int, last: int, settings: Sequence[str] = ()
    ) -> Record | None:
        """Replay steps, with what is needed before them; return the record of that."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        output = folder / "record"
        request = Request(record.path, first, last, self.model, tuple(settings), record_to=str(output))
        task = [*ON_RANK, "replay", request_text(request)]
        if self.ranks.run(task, record.header.world_size, {QUIET: "1"}, folder / "ranks.log", False) != 0:
            return None
        replayed = open_record(output)
        return replayed if last in replayed.steps else None


@contextmanager
def runner(model: str | None) -> Iterator[Runner]:
    """Provide a runner whose files are removed afterwards."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        yield Runner(Path(folder), cleanup, model)


def first_of(left: Record, right: Record, step: int) -> StageDifference | None:
    """Return the first difference of a step of two records of ours."""
    return next(iter(compare_steps(left.step(step), right.step(step))), None)


def is_before(one: StageDifference | None, other: StageDifference) -> bool:
    return one is not None and STAGES.index(one.stage) <= STAGES.index(other.stage)
