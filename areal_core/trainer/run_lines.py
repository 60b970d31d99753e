"""What a run tells whoever watches it: a first line, one a step, and a last one; and signals that end it in order.

```
first SIGINT or SIGTERM    SystemExit(128 + number) in the main thread: loggers and observers are told, the last line says where to go on
second one                 ends the process at once
```

A rank that waits in a collective hears a signal when that returns or fails. Who sent it (torchrun, the launcher, SLURM) kills after a
grace of its own, so nothing waits for ever.
"""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from areal_core.config import BaseExperimentConfig
from areal_core.engine.checkpoint_file import read_checkpoint_file
from areal_core.engine.errors import CheckpointError
from areal_core.paths import run_folder
from areal_core.telemetry import step_summary
from areal_core.trainer.recovery import step_of

ENDING = (signal.SIGINT, signal.SIGTERM)
NOTHING_KEPT = "and no model was kept: saver.freq_epochs, freq_steps or freq_secs writes them"


class RunLines:
    """The lines of a run, printed by one rank, and its signals, as a context manager around its steps.

    Args:
        first_step: counts from 0; above 0 in a run that continues.
        end_step: the step after the last one.
        prints: whether this rank tells anything; all hear signals.
    """

    def __init__(self, config: BaseExperimentConfig, first_step: int, end_step: int, prints: bool) -> None:
        self.name = f"{config.experiment_name}/{config.trial_name}"
        self.logs = run_folder(config, "logs")
        self.checkpoints = run_folder(config, "checkpoints")
        self.first_step, self.end_step, self.prints = first_step, end_step, prints
        self.next_step = first_step
        self._began_s = time.monotonic()
        self._handlers: dict[int, Any] = {}

    def __call__(self, step: int, stats: dict[str, float]) -> None:
        """The line of a step."""
        self.next_step = step + 1
        self._print(step_summary(step, stats, self.end_step, stats.get("timeperf/step")))

    def __enter__(self) -> "RunLines":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in ENDING}
            for number, handler in self._handlers.items():
                if handler is not signal.SIG_IGN:  # as of a run that was started with nohup
                    signal.signal(number, end_in_order)
        if self.first_step >= self.end_step:
            self._tell(f"all {self.end_step} steps were trained before; nothing is left to do")
        else:
            self._tell(f"steps {self.first_step + 1} to {self.end_step}; results in {self.logs}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        done, seconds = self.next_step - self.first_step, time.monotonic() - self._began_s
        if error is None:
            kept = f"checkpoints in {self.checkpoints}" if self.checkpoints.is_dir() else NOTHING_KEPT
            where = f"statistics in {self.logs / 'stats.jsonl'}, {kept}"
            self._tell(f"done, {done} step{'s' * (done != 1)} in {seconds:.1f} s; {where}")
        else:
            ended = f"ended by {name_of(error)} after {done} of {self.end_step - self.first_step} steps"
            self._tell(f"{ended}; {where_to_go_on(self.checkpoints / 'recover')}")

    def _tell(self, said: str) -> None:
        self._print(f"{self.name}: {said}")

    def _print(self, line: str) -> None:
        if self.prints:
            print(line, flush=True)


def end_in_order(number: int, frame: FrameType | None) -> None:
    """Raises SystemExit; whatever comes next ends the process at once."""
    for other in ENDING:
        signal.signal(other, signal.SIG_DFL)
    raise SystemExit(128 + number)


def name_of(error: BaseException) -> str:
    """The signal, or the kind of exception."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return signal.Signals(error.code - 128).name
    return type(error).__name__


def where_to_go_on(folder: Path) -> str:
    """What is lost, and how the run is continued."""
    for checkpoint in sorted(folder.glob("step-*[0-9]"), key=step_of, reverse=True):
        try:
            read_checkpoint_file(checkpoint)  # not its weights: who sent a signal does not wait for long
        except CheckpointError:
            continue  # which a run that continues will tell
        at = step_of(checkpoint)
        return f"with recover.mode=auto it goes on after step {at}, from {os.path.relpath(checkpoint)}"
    return "there is no checkpoint to go on from: recover.mode=auto with recover.freq_steps writes them"
