"""Compare a replay with its record on the ranks: rank 0 prints each step and writes the report."""

import os
from typing import Any

from rich.console import Console

from areal_core.trainer.rl import Observer, PPOTrainer
from areal_debug.render import QUIET, console, write_report
from areal_debug.replay.render import print_start, print_step, print_verdict
from recorder import Record
from replayer.check import ReplayCheck
from replayer.request import Request
from replayer.rerun import verdict_at_once
from replayer.run import check_of


def replay_reporter(
    record: Record, trainer: PPOTrainer, request: Request, with_verdict: bool = True
) -> Observer:
    """Make an observer that compares with the record, prints on rank 0, and writes a report.

    Args:
        with_verdict: also print the verdict, as far as it is known without measuring noise.
    """
    if trainer.ranks.rank != 0:
        return check_of(record, trainer, request)
    out = Console(quiet=True) if os.environ.get(QUIET) else console()
    check: ReplayCheck = check_of(
        record,
        trainer,
        request,
        on_start=lambda report: print_start(out, report),
        on_step=lambda result: print_step(
            out, result, in_detail=with_verdict or check.report.guarantee.kind == "bitwise"
        ),
    )

    def observe(event: str, **facts: Any) -> None:
        check(event, **facts)
        if event == "end" and check.report.steps:
            check.report.verdict = verdict_at_once(check.report)
            if with_verdict:
                print_verdict(out, check.report)
            write_report(check.report.to_dict())

    return observe
