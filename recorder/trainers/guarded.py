"""Record inside another trainer's process, whose run never stops because of it.

The first failure is one sentence on stderr, and recording ends.
"""

import atexit
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from recorder.environment import library_version
from recorder.trainers.recorder import Recorder, folder_of_environment
from recorder.writer import describe, print_to_stderr


class Guarded:
    """A Recorder that opens at the first step and ends at the first failure, or with the process.

    Args:
        trainer: name of the framework, and of its distribution.
        folder: None: AREAL_DEBUG_RECORD names it. A record in it is continued.
        rank: of this process. Others than 0 have a record of their own, FOLDER-rankN, so that no
            process waits for another.
        last: called when the process ends, to give the last steps.
        options: of the Recorder.
    """

    def __init__(
        self,
        trainer: str,
        folder: str | os.PathLike[str] | None = None,
        *,
        rank: int = 0,
        last: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        self.trainer, self.folder, self.rank, self.last, self.options = trainer, folder, rank, last, options
        self.recorder: Recorder | None = None
        self.ended = False
        atexit.register(self.end_with_process)

    def step(
        self,
        step: int,
        samples: Callable[[], Sequence[Any]],
        *,
        not_recorded: Collection[str] = (),
        config: Any = None,
        **facts: Any,
    ) -> None:
        """Record a step.

        Args:
            samples: returns them.
            not_recorded: names of values that the trainer has and the record has not.
            config: of the run, taken at the first step.
            facts: of `Recorder.step`.
        """
        if not_recorded:
            facts["details"] = {"not_recorded": sorted(not_recorded)}

        def write() -> None:
            given = samples()
            is_first = self.recorder is None
            self.recorder = self.recorder or self.open(config)
            self.recorder.step(step, given, **facts)
            self.ended = self.recorder.writer.ended is not None  # it has printed why
            if is_first:
                # again, in the place of the recorder's: before its lock is released at the exit
                atexit.unregister(self.recorder.end)
                atexit.unregister(self.end_with_process)
                atexit.register(self.end_with_process)

        self.attempt(f"step {step}", write)

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Do some work of the recording, unless it has ended; an error ends it."""
        if self.ended:
            return
        try:
            work()
        except Exception as error:  # the boundary: the run is not ours
            message = str(error) if isinstance(error, ValueError) else describe(error)
            self.notice(f"{what} is not recorded: {message}; the run continues without recording")
            self.end(type(error).__name__)

    def open(self, config: Any) -> Recorder:
        """Return the recorder. Raises RecordError if no folder is named or it is taken."""
        return Recorder(
            folder_of_rank(self.folder or folder_of_environment(self.trainer), self.rank),
            trainer=self.trainer,
            trainer_version=library_version(self.trainer),
            config=config,
            resume=True,
            when_failing="continue",
            **self.options,
        )

    def notice(self, text: str) -> None:
        """Print a sentence for the user."""
        print_to_stderr(f"{self.trainer}: {text}")

    def end(self, error: str | None = None) -> None:
        self.ended = True
        atexit.unregister(self.end_with_process)
        if self.recorder is not None:
            try:
                self.recorder.end(error)
            except Exception as failure:  # the boundary: the run is not ours
                self.notice(f"the end of the record is not written: {describe(failure)}")

    def end_with_process(self) -> None:
        self.last()
        failed = getattr(sys, "last_type", None)
        self.end(None if failed is None else failed.__name__)


def folder_of_rank(folder: str | os.PathLike[str], rank: int) -> str:
    """Return the folder of a process: another one for each rank."""
    return f"{os.fspath(folder)}-rank{rank}" if rank else os.fspath(folder)


def rank_of_process() -> int:
    return int(os.environ.get("RANK", "0"))
