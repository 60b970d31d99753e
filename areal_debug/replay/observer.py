"""Compare a replay with its record on the ranks: rank 0 prints each step and writes the report."""

import os
from typing import Any

from rich.console import Console

from areal_core.trainer.rl import Observer, PPOTrainer
from areal_debug.render import QUIET, REPORT_FILE, VERBOSE, console, write_report
from areal_debug.replay.first_difference import MakeRecorder, StepKeeper
from areal_debug.replay.render import print_start, print_step, print_verdict
from recorder import Record
from replayer.request import Request
from replayer.rerun import verdict_at_once
from replayer.run import check_of


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
    keeps = request.locate and record.header.recording.has_plans and REPORT_FILE in os.environ
    keeper = StepKeeper(record, trainer, check.report, make_recorder) if keeps else None

    def observe(event: str, **facts: Any) -> None:
        if keeper is not None:
            keeper(event, **facts)
        check(event, **facts)
        if event != "end" or not is_first:
            return
        if keeper is not None:
            if check.report.steps:
                keeper.find()
            keeper.remove()
        if check.report.steps:
            check.report.verdict = verdict_at_once(check.report)
            if with_verdict:
                print_verdict(out, check.report, request)
            write_report(check.report.to_dict())

    return observe
