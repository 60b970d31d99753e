"""Compare a replay with its record on the ranks: rank 0 prints each step and writes the report.

    events ─> recorder ─> only the last step is kept ─┐ ends with the first step that differs
    record's step ─────────────────────────────────────┴─> compared stage by stage

The replayed step is recorded with the scope of the record, so that it has what the record has.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from areal_debug.render import QUIET, REPORT_FILE, VERBOSE, console, write_report
from areal_debug.replay.report import print_start, print_step, report_of
from areal_debug.report.terminal import print_report
from recorder import Record, Recording, RecordingOptions, Retention, open_record
from replayer.anchors import AnchorPolicy
from replayer.check import ReplayReport
from replayer.compare.patterns import causal_tensor, find_pattern
from replayer.compare.stages import compare_steps
from replayer.diff import settle_stage
from replayer.request import Request
from replayer.rerun import verdict_at_once
from replayer.run import check_of

MakeRecorder = Callable[[PPOTrainer, Path, RecordingOptions, None, AnchorPolicy], Observer]


def replay_reporter(
    record: Record,
    trainer: PPOTrainer,
    request: Request,
    make_recorder: MakeRecorder,
    with_verdict: bool = True,
) -> Observer:
    """Make an observer that compares with the record, prints on rank 0, and writes a report.

    Args:
        make_recorder: `areal_debug.wiring.recorder_of`.
        with_verdict: also print the verdict, as far as it is known without measuring noise.
    """
    is_first = trainer.ranks.rank == 0
    out = Console(quiet=True) if QUIET in os.environ or not is_first else console()
    check = check_of(
        record,
        trainer,
        request,
        on_start=lambda report: print_start(out, report),
        on_step=lambda result: print_step(out, result, VERBOSE in os.environ),
    )
    report = check.report
    folder = keep = None
    if request.locate and record.header.recording.has_plans and REPORT_FILE in os.environ:
        # beside the report, where all ranks can write
        folder = Path(os.environ[REPORT_FILE]).with_name("replayed-step")
        options = RecordingOptions(
            Recording("full" if record.header.recording.scope == "full" else "plan"),
            overwrite=True,
            queue_steps=1,
            when_failing="continue",
            retention=Retention(keep_last=1),
        )
        keep = make_recorder(trainer, folder, options, None, AnchorPolicy())

    def observe(event: str, **facts: Any) -> None:
        if keep is not None and (event == "end" or report.first_different is None):
            keep(event, **facts)
        check(event, **facts)
        if event != "end" or not is_first:
            return
        if folder is not None:
            if report.steps:
                locate(record, report, folder)
            shutil.rmtree(folder, ignore_errors=True)
        if report.steps:
            report.verdict = verdict_at_once(report)
            if with_verdict:
                print_report(out, report_of(report, request))
            write_report(report.to_dict())

    return observe


def locate(record: Record, report: ReplayReport, folder: Path) -> None:
    """Add the first difference of the kept step, and its pattern, to the report.

    Adds nothing if no step differs, or the disk did not take the step.
    """
    first, replayed = report.first_different, open_record(folder)
    if first is None or report.set_differently is None or first.step not in replayed.steps:
        return
    sides = record.step(first.step), replayed.step(first.step)
    if not (differences := compare_steps(*sides)):
        return
    report.first = causal_tensor(settle_stage(differences, report.set_differently))
    pattern = find_pattern(*sides, report.first)
    report.pattern = None if pattern is None else pattern.why
