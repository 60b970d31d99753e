"""Run replays on ranks of this machine for a command, and judge their reports. Imports no torch."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from areal_core.environment import DETERMINISTIC
from areal_core.launch.warm import WarmRanks, warm_ranks
from areal_debug.installation import require
from areal_debug.render import (
    QUIET,
    REPORT_FILE,
    VERBOSE,
    count,
    fail,
    is_verbose,
    read_report,
    with_progress,
)
from areal_debug.start_up import bytecode_variables
from recorder import Record, open_record
from replayer.check import ReplayReport, parse_report
from replayer.preconditions import summation_on
from replayer.request import Request, Summation
from replayer.rerun import replay_and_judge

ON_RANK = ("-m", "areal_debug.rank_tasks.on_rank")
SUMMATIONS = {"fixed": "sums in rank order", "gloo": "gloo's order of summation, emulated"}
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
    require("transformers")
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
    return parse_report(report_of_ranks(ranks, task("replay", **asdict(request)), num_ranks, quiet))


def task(name: str, **arguments: Any) -> list[str]:
    """Return the arguments of Python for a task of `on_rank`, with its arguments as JSON types."""
    return [*ON_RANK, name, json.dumps(arguments)]


def report_of_ranks(
    ranks: WarmRanks, task: Sequence[str], num_ranks: int, quiet: bool = False
) -> dict[str, Any]:
    """Run a task on ranks and return the report of rank 0.

    Ends the command with the ranks' exit code if they fail.
    """
    shown = {QUIET: "1"} if quiet else {VERBOSE: "1"} if is_verbose() else {}
    return reported(
        lambda folder, env: ranks.run(list(task), num_ranks, env | shown, folder / "ranks.log"),
        "its last step; see its output above",
    )


def reported(run: Callable[[Path, dict[str, str]], int], until: str) -> dict[str, Any]:
    """Return the report of ranks that `run` starts, with a folder and the variable of their report.

    Ends the command with their exit code if they fail: before `until`, a phrase.
    """
    # Ctrl-C leaves ranks that may still write into it
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = Path(folder) / "report.json"
        code = run(Path(folder), {REPORT_FILE: str(report)})
        if code != 0 or not report.exists():
            fail(f"the replay ended with exit code {code} before {until}", min(code or 1, 2))
        return read_report(report)


def placed(record: Record, virtual: Summation, num_ranks: int) -> str:
    """Describe the ranks of a replay."""
    if not virtual:
        return count(num_ranks, "rank")
    processes = f"{num_ranks} process{'es' * (num_ranks > 1)}"
    return f"{processes}, in place of {record.header.world_size} ranks: {SUMMATIONS[virtual]}"


@dataclass
class Runner:
    """Replays steps of records into records, for an answer that must be proven.

    Every replay runs in processes of its own, forks of one that has imported torch, which starts
    with the first. `cleanup` ends them.
    """

    folder: Path
    cleanup: ExitStack
    model: str | None = None

    @cached_property
    def ranks(self) -> WarmRanks:
        """The process whose forks run the replays."""
        return self.cleanup.enter_context(replay_ranks())

    def replay(
        self,
        record: Record,
        first: int,
        last: int,
        settings: Sequence[str] = (),
        apart: bool = False,
        shift: int = 0,
        num_ranks: int | None = None,
    ) -> Record | None:
        """Replay steps from the nearest anchor; return the record of that, None if it fails.

        Args:
            apart: by a new interpreter, as forks of one process have the same layout of memory.
            shift: rank r gets the GPU that is `shift` further than its own.
            num_ranks: processes that compute the shares of all recorded ranks.
        """
        if apart:
            with ExitStack() as cleanup:
                other = Runner(self.folder, cleanup, self.model)
                return other.replay(record, first, last, settings, shift=shift, num_ranks=num_ranks)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        output = folder / "record"
        num_ranks = num_ranks or record.header.world_size
        request = Request(record.path, first, last, self.model, tuple(settings), record_to=str(output))
        request = replace(request, virtual=summation_on(record, num_ranks))
        asked = task("replay", **asdict(request))
        env = {QUIET: "1"} | shifted_gpus(shift)
        if self.ranks.run(asked, num_ranks, env, folder / "ranks.log", False) != 0:
            return None
        replayed = open_record(output)
        return replayed if last in replayed.steps else None


def shifted_gpus(shift: int) -> dict[str, str]:
    """Return the variable with this machine's GPUs from the `shift`-th on; none without GPUs."""
    name = "CUDA_VISIBLE_DEVICES"
    numbers = [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    gpus = [gpu for gpu in os.environ.get(name, ",".join(numbers)).split(",") if gpu]
    at = shift % len(gpus) if gpus else 0
    return {name: ",".join(gpus[at:] + gpus[:at])} if at else {}


@contextmanager
def runner(model: str | None) -> Iterator[Runner]:
    """Provide a runner whose files are removed afterwards."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        yield Runner(Path(folder), cleanup, model)


def refuse_damage(record: str | Path, num_steps: int) -> None:
    """End the command with code 1 if any byte has changed, naming the first damaged files."""
    from replayer.preconditions import verify_bytes

    problems = with_progress("checking bytes", num_steps, lambda tick: verify_bytes(record, tick))
    if problems:
        named = "; ".join(str(problem) for problem in problems[:5])
        fail(f"the record is damaged: {named}", code=1)
