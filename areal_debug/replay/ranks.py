"""Run replays on ranks of this machine for a command, and judge their reports. Imports no torch."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_debug.render import QUIET, REPORT_FILE, VERBOSE, fail, is_verbose, read_report
from replayer.check import ReplayReport, parse_report
from replayer.request import Request, request_text
from replayer.rerun import replay_and_judge


def replay_on_ranks(
    request: Request,
    num_ranks: int,
    quiet: bool = False,
    notify: Callable[[str], None] = lambda message: None,
) -> ReplayReport:
    """Replay on `num_ranks` processes, which print unless `quiet`; return the judged report.

    Replays again, quietly, if noise must be measured; `notify` gets the reason. Ends the command
    with the ranks' exit code if they fail.
    """
    quiet_now = quiet

    def run(one: Request) -> ReplayReport:
        return run_once(one, num_ranks, quiet_now)

    def before_rerun(why: str) -> None:
        nonlocal quiet_now
        quiet_now = True
        notify(why)

    return replay_and_judge(request, run, before_rerun)


def run_once(request: Request, num_ranks: int, quiet: bool) -> ReplayReport:
    """Run one replay and return the report of rank 0."""
    arguments = ["-m", "areal_debug.replay.on_rank", "replay", request_text(request)]
    return parse_report(report_of_ranks(arguments, num_ranks, quiet))


def report_of_ranks(arguments: list[str], num_ranks: int, quiet: bool = False) -> dict[str, Any]:
    """Run `areal_debug.replay.on_rank` on ranks and return the report of rank 0.

    Ends the command with the ranks' exit code if they fail.
    """
    from areal_core.environment import DETERMINISTIC
    from areal_core.launch.torchrun import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        shown = {QUIET: "1"} if quiet else {VERBOSE: "1"} if is_verbose() else {}
        environment = DETERMINISTIC | {REPORT_FILE: str(report)} | shown
        code = run_ranks(arguments, num_ranks, environment, Path(folder))
        if code != 0 or not report.exists():
            fail(
                f"the replay ended with exit code {code} before its last step; see its output above",
                code or 1,
            )
        return read_report(report)
