"""Find the first stage and row of a replay that differ from its record, in the same run.

    events ─> recorder ─> only the last step is kept ─┐ ends with the first step that differs
    record's step ─────────────────────────────────────┴─> compared stage by stage

The replayed step is recorded with the scope of the record, so that it has what the record has.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_core.trainer.rl import Observer, PPOTrainer
from areal_debug.render import REPORT_FILE
from recorder import Record, Recording, RecordingOptions, Retention, open_record
from replayer.anchors import AnchorPolicy
from replayer.check import ReplayReport
from replayer.diff import settle_stage
from replayer.patterns import causal_tensor, find_pattern
from replayer.stages import compare_steps

MakeRecorder = Callable[[PPOTrainer, Path, RecordingOptions, None, AnchorPolicy], Observer]


class StepKeeper:
    """An observer on every rank that keeps the first step that differs, called before the check.

    Args:
        report: of the check, in which a step that differs ends the recording.
        make_recorder: `areal_debug.wiring.recorder_of`.
    """

    def __init__(
        self, record: Record, trainer: PPOTrainer, report: ReplayReport, make_recorder: MakeRecorder
    ) -> None:
        self.record, self.report = record, report
        # beside the report, where all ranks can write
        self.folder = Path(os.environ[REPORT_FILE]).with_name("replayed-step")
        options = RecordingOptions(
            Recording("full" if record.header.recording.scope == "full" else "plan"),
            overwrite=True,
            queue_steps=1,
            when_failing="continue",
            retention=Retention(keep_last=1),
        )
        self.observe = make_recorder(trainer, self.folder, options, None, AnchorPolicy())

    def __call__(self, event: str, **facts: Any) -> None:
        """Handle an event (ARCHITECTURE.md)."""
        if event == "end" or self.report.first_different is None:
            self.observe(event, **facts)

    def find(self) -> None:
        """Add the first difference of the kept step, and its pattern, to the report.

        On rank 0 after the end. Adds nothing if no step differs, or the disk did not take the step.
        """
        first = self.report.first_different
        replayed = open_record(self.folder)
        if first is None or self.report.set_differently is None or first.step not in replayed.steps:
            return
        sides = self.record.step(first.step), replayed.step(first.step)
        if not (differences := compare_steps(*sides)):
            return
        self.report.first = causal_tensor(settle_stage(differences, self.report.set_differently))
        pattern = find_pattern(*sides, self.report.first)
        self.report.pattern = None if pattern is None else pattern.why

    def remove(self) -> None:
        """Remove the kept step, on rank 0."""
        shutil.rmtree(self.folder, ignore_errors=True)
