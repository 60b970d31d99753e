"""The printed lines of a run (first, one per step, last), and the signals that end it in order.

```
first SIGINT or SIGTERM    SystemExit(128 + number) in the main thread: loggers and observers
                           finish, the last line names the checkpoint to continue from
second one                 ends the process immediately
```

A rank that waits in a collective handles a signal when the collective returns or fails. The sender
(torchrun, the launcher, SLURM) kills after a grace period of its own, so nothing waits
indefinitely.
"""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from areal_core.config import BaseExperimentConfig
from areal_core.engine.checkpoint.files import read_checkpoint_file
from areal_core.errors import CheckpointError
from areal_core.paths import run_folder
from areal_core.telemetry.loggers import step_summary
from areal_core.trainer.checkpointing import step_of

ENDING = (signal.SIGINT, signal.SIGTERM)
NOTHING_KEPT = "and no model was kept: saver.save_last is false and no saver.freq_* is set"


class RunLines:
    """The lines of a run, printed by one rank, and its signals: a context manager of its steps.

    Args:
        first_step: counts from 0; above 0 in a run that continues.
        end_step: the step after the last one.
        prints: whether this rank prints; all ranks handle signals.
    """

    def __init__(self, config: BaseExperimentConfig, first_step: int, end_step: int, prints: bool) -> None:
        self.name = f"{config.experiment_name}/{config.trial_name}"
        self.logs = run_folder(config, "logs")
        self.checkpoints = run_folder(config, "checkpoints")
        self.config = config
        self.first_step, self.end_step, self.prints = first_step, end_step, prints
        self.next_step = first_step
        self._started_s = time.monotonic()
        self._handlers: dict[int, Any] = {}

    def __call__(self, step: int, stats: dict[str, float]) -> None:
        self.next_step = step + 1
        self._print(step_summary(step, stats, self.end_step, stats.get("timeperf/step")))

    def __enter__(self) -> "RunLines":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in ENDING}
            for number, handler in self._handlers.items():
                if handler is not signal.SIG_IGN:  # ignored in a run that was started with nohup
                    signal.signal(number, end_in_order)
        if self.first_step >= self.end_step:
            self._report(f"all {self.end_step} steps were trained before; nothing is left to do")
        else:
            self._report(f"steps {self.first_step} to {self.end_step - 1}; results in {self.logs}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        done, seconds = self.next_step - self.first_step, time.monotonic() - self._started_s
        if error is None:
            kept = what_was_kept(self.checkpoints)
            where = f"statistics in {self.logs / 'stats.jsonl'}, {kept}"
            self._report(f"done, {done} step{'s' * (done != 1)} in {seconds:.1f} s; {where}")
        else:
            ended = f"{how_ended(error)} after {done} of {self.end_step - self.first_step} steps"
            self._report(
                f"{ended}; {how_to_continue(self.checkpoints / 'recover', self.config, self.next_step)}"
            )

    def _report(self, text: str) -> None:
        self._print(f"{self.name}: {text}")

    def _print(self, line: str) -> None:
        if self.prints:
            print(line, flush=True)


def what_was_kept(checkpoints: Path) -> str:
    """Name the folder of the last model, or else that of the checkpoints, or why there is none."""
    models = [folder for folder in (checkpoints / "default").glob("*") if folder.is_dir()]
    if models:
        return f"the model in {max(models, key=lambda folder: folder.stat().st_mtime)}"
    return f"checkpoints in {checkpoints}" if checkpoints.is_dir() else NOTHING_KEPT


def end_in_order(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit; the next signal ends the process immediately."""
    for other in ENDING:
        signal.signal(other, signal.SIG_DFL)
    raise SystemExit(128 + number)


def how_ended(error: BaseException) -> str:
    """Return "interrupted" for a signal: the launcher passes Ctrl-C on as SIGTERM; else the type."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return "interrupted"
    return f"ended by {type(error).__name__}"


def how_to_continue(folder: Path, config: BaseExperimentConfig, next_step: int) -> str:
    """Name the checkpoint that a continued run starts from, or the options that write one."""
    recover, debug = config.recover, config.debug
    for checkpoint in sorted(folder.glob("step-*[0-9]"), key=step_of, reverse=True):
        try:
            read_checkpoint_file(checkpoint)  # not its weights: a signal leaves little time
        except CheckpointError:
            continue  # the continued run reports it
        at = step_of(checkpoint)
        return f"with recover.mode=auto it continues at step {at}, from {os.path.relpath(checkpoint)}"
    if recover.mode in ("disabled", "off"):
        return "there is no checkpoint to continue from: recover.mode=auto writes them"
    due = next_step + -(next_step + 1) % recover.freq_steps if recover.freq_steps else None
    when = "" if due is None else f": the next was due after step {due}"
    advice = "" if recover.freq_steps == 1 else ". To save more often: recover.freq_steps=1"
    again = ". To start again and replace the record: --force" if debug.dump_rollout_data else ""
    return f"no checkpoint was written yet{when}{advice}{again}"
