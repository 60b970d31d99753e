"""Run replays on ranks of this machine for a command, and judge their reports. Imports no torch."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_core.environment import DETERMINISTIC
from areal_core.launch.warm import WarmRanks, warm_ranks
from areal_debug.render import QUIET, REPORT_FILE, VERBOSE, fail, is_verbose, read_report
from areal_debug.start_up import bytecode_variables
from recorder import open_record
from replayer.check import ReplayReport, parse_report
from replayer.request import Request, request_text
from replayer.rerun import replay_and_judge

ON_RANK = ("-m", "areal_debug.replay.on_rank")
# What every replay imports, and the model of most of them.
MODULES = (
    "areal_debug.replay.observer",
    "areal_debug.wiring",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
)


@contextmanager
def replay_ranks(attached: bool = False) -> Iterator[WarmRanks]:
    """Start the process that runs the replays of a command; it imports torch meanwhile."""
    with warm_ranks(DETERMINISTIC | bytecode_variables(), MODULES, attached) as ranks:
        yield ranks


def replay_on_ranks(
    ranks: WarmRanks,
    request: Request,
    num_ranks: int,
    quiet: bool = False,
    notify: Callable[[str], None] = lambda message: None,
) -> ReplayReport:
    """Replay on `num_ranks` processes, which print unless `quiet`; return the judged report.

    Replays again, quietly, if noise must be measured; `notify` gets the reason. Ends the command
    with the ranks' exit code if they fail.
    """
    is_first = True

    def run(one: Request) -> ReplayReport:
        if is_first or open_record(request.record).header.config["deterministic"]:
            return run_once(ranks, one, num_ranks, quiet or not is_first)
        with replay_ranks() as others:  # forks of one process vary less than runs do
            return run_once(others, one, num_ranks, quiet=True)

    def before_rerun(why: str) -> None:
        nonlocal is_first
        is_first = False
        notify(why)

    return replay_and_judge(request, run, before_rerun)


def run_once(ranks: WarmRanks, request: Request, num_ranks: int, quiet: bool) -> ReplayReport:
    return parse_report(report_of_ranks(ranks, ["replay", request_text(request)], num_ranks, quiet))


def report_of_ranks(
    ranks: WarmRanks, task: Sequence[str], num_ranks: int, quiet: bool = False
) -> dict[str, Any]:
    """Run a task of `areal_debug.replay.on_rank` on ranks and return the report of rank 0.

    Ends the command with the ranks' exit code if they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        shown = {QUIET: "1"} if quiet else {VERBOSE: "1"} if is_verbose() else {}
        environment = {REPORT_FILE: str(report)} | shown
        code = ranks.run([*ON_RANK, *task], num_ranks, environment, Path(folder) / "ranks.log")
        if code != 0 or not report.exists():
            fail(
                f"the replay ended with exit code {code} before its last step; see its output above",
                code or 1,
            )
        return read_report(report)
