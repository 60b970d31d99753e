"""`areal-debug record cut` on a rank: its recorder, what is printed, interruptions."""

import os
import signal
from pathlib import Path
from types import FrameType

from rich.console import Console

from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from areal_debug.render import QUIET, console, format_number, styled
from areal_debug.wiring import recorder_of
from recorder import Recording, RecordingOptions
from replayer.bug.cut import CutReport, Watcher, cut_step
from replayer.bug.cut_request import CutRequest
from replayer.bug.shrink import Numbers, Rows

MOST_NAMED = 4  # rows that are printed by their names


def cut_on_rank(request: CutRequest) -> CutReport:
    """Cut a step on this rank; rank 0 prints each reduction.

    A signal that would end the process ends the reduction: the best so far is written.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)

    out = Console(quiet=True) if os.environ.get(QUIET) else console()

    def on_start(rows: Rows, numbers: Numbers) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        out.print("[dim]advantages are computed from the rows that are left[/dim]")
        print_size(out, "at first", rows, numbers)

    def on_smaller(rows: Rows, numbers: Numbers, num_runs: int) -> None:
        print_size(out, f"run {num_runs}", rows, numbers)

    watcher = Watcher(on_start, on_smaller, lambda: bool(received))
    return cut_step(request, make_recorder, watcher)


def make_recorder(trainer: PPOTrainer, folder: Path, recording: Recording) -> Observer:
    """Make an observer that records one step, without anchors."""
    observe = recorder_of(trainer, folder, RecordingOptions(recording, text=True))

    def observe_one_step(event: str, **facts: object) -> None:
        # of version 0, because later ones start with an anchor
        observe(event, **facts | ({"version": 0} if event == "start" else {}))

    return observe_one_step


def print_size(out: Console, when: str, rows: Rows, numbers: Numbers) -> None:
    tokens = sum(len(row.tokens) for row in rows)
    names = ", ".join(row.name for row in rows) if len(rows) <= MOST_NAMED else ""
    seen = (
        numbers.error or f"loss {format_number(numbers.loss)}, grad_norm {format_number(numbers.grad_norm)}"
    )
    out.print(
        styled("{:>9}  {:>6,} rows {:>9,} tokens   {}   [dim]{}[/dim]", when, len(rows), tokens, seen, names)
    )
