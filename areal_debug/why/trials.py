"""Steps run again to prove or refute a cause: with another option, by another commit, unchanged.

Every trial runs in processes of its own, so that a failure of one leaves the answer as it was: it
returns None, and the evidence says what could not be tried.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_core.environment import DETERMINISTIC
from areal_core.launch.torchrun import run_ranks
from areal_debug.render import QUIET
from recorder import Record, open_record
from replayer.request import Request, request_text
from replayer.stages import STAGES, StageDifference, compare_steps


@dataclass(frozen=True)
class Runner:
    """Runs steps of records again: a folder for what they write, and the model, if it has moved."""

    folder: Path
    model: str | None = None

    def replay_all(self, record: Record) -> Record | None:
        """Replay every step of a record and return the record of that, None if it fails."""
        return self.replay_steps(record, record.steps[0], record.steps[-1])

    def replay(self, record: Record, step: int, settings: Sequence[str] = ()) -> Record | None:
        """Replay from the nearest anchor up to a step; None if it fails."""
        return self.replay_steps(record, step, step, settings)

    def replay_steps(
        self, record: Record, first: int, last: int, settings: Sequence[str] = ()
    ) -> Record | None:
        """Replay steps, with what is needed before them; return the record of that."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        output = folder / "record"
        request = Request(record.path, first, last, self.model, tuple(settings), record_to=str(output))
        arguments = ["-m", "areal_debug.replay.on_rank", "replay", request_text(request)]
        environment = DETERMINISTIC | {QUIET: "1"}
        if run_ranks(arguments, record.header.world_size, environment, folder, echo=False) != 0:
            return None
        replayed = open_record(output)
        return replayed if last in replayed.steps else None


@contextmanager
def runner(model: str | None) -> Iterator[Runner]:
    """Provide a runner whose files are removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Runner(Path(folder), model)


def first_of(left: Record, right: Record, step: int) -> StageDifference | None:
    """Return the first difference of a step of two records of ours."""
    return next(iter(compare_steps(left.step(step), right.step(step))), None)


def is_before(one: StageDifference | None, other: StageDifference) -> bool:
    """Return whether a difference is at the stage of another one or before it."""
    return one is not None and STAGES.index(one.stage) <= STAGES.index(other.stage)
