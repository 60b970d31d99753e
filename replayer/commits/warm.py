"""Check out commits of a repository in a private one that shares its objects.

The user's repository is only read: nothing is registered in it, so a process that is killed leaves
a folder in the temporary directory and no more, which the next one removes.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import msgspec

from areal_core.environment import DETERMINISTIC
from areal_core.launch.torchrun import ended_on_signals
from areal_core.launch.warm import LIBRARIES, WarmRanks, warm_ranks
from areal_core.safety.private import make_private
from areal_core.safety.scratch import FolderInUse, locked_folder
from recorder import Record, open_record
from replayer.carried import model_folder
from replayer.commits.acting import changed_definitions, first_changed_line, sources
from replayer.commits.bisect import BisectReport, Numbers, find_commit, git, has_commit, parse_numbers
from replayer.commits.layers import Call, LayersReport, compare_calls
from replayer.commits.outside import code_of
from replayer.errors import ReplayError
from replayer.preconditions import check_model, check_recorded_results, step_range
from replayer.request import Request


@dataclass
class Checkout:
    """A private working tree; `commit` is the one that it has now, "" before the first."""

    repository: Path
    place: Path
    commit: str = ""

    def switch(self, commit: str) -> Path:
        """Check out a commit, without a compiled file of another one, and return the folder.

        Raises NothingToBisect.
        """
        wanted = git(self.repository, "rev-parse", f"{commit}^{{commit}}").strip()
        if self.commit and self.commit != wanted:
            # Python compares seconds and sizes, which may be equal in both commits
            changed = git(self.place, "diff", "--name-only", "-z", self.commit, wanted, "--", "*.py")
            for name in filter(None, changed.split("\0")):
                Path(cache_from_source(str(self.place / name))).unlink(missing_ok=True)
        hooks_off = ("-c", f"core.hooksPath={os.devnull}")
        git(self.place, *hooks_off, "checkout", "--quiet", "--force", "--detach", wanted)
        self.commit = wanted
        return self.place


@contextmanager
def checkout(repository: Path) -> Iterator[Checkout]:
    """Make a private repository beside the user's, and remove it, also when a signal ends us.

    Raises NothingToBisect for a folder without a repository.
    """
    objects = Path(repository, git(repository, "rev-parse", "--git-path", "objects").strip()).resolve()
    with ended_on_signals(), private_folder() as folder:
        place = folder / "code"
        git(folder, "init", "--quiet", str(place))
        (place / ".git" / "objects" / "info" / "alternates").write_text(f"{objects}\n")
        yield Checkout(repository, place)


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a temporary folder of this process; remove those of processes that were killed."""
    root = Path(tempfile.gettempdir(), f"areal-debug-commits-{os.getuid()}")
    make_private(root)
    for left in root.iterdir():
        with suppress(FolderInUse):
            handle = locked_folder(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(handle)
    folder = Path(tempfile.mkdtemp(dir=root))
    handle = locked_folder(folder)
    try:
        yield folder
    finally:
        compiled = Path(cache_from_source(str(folder / "any.py"))).parent  # elsewhere, if so configured
        for made in (folder, compiled):
            shutil.rmtree(made, ignore_errors=True)
        os.close(handle)


CURRENT = Path(__file__).parents[2]  # this checkout
ON_COMMIT = Path(__file__).with_name("on_commit.py")


@dataclass
class Commits:
    """The commits of a repository, ready to replay; `ranks` have imported the libraries."""

    checkout: Checkout
    ranks: WarmRanks

    def replay(self, commit: str, request: Request, num_ranks: int) -> Numbers | None:
        """Replay with a commit's own code; None if it cannot.

        Raises NothingToBisect for a commit that does not exist.
        """
        place = self.checkout.switch(commit)
        report = self._ask("replay", place, request, num_ranks)
        return None if report is None else parse_numbers(report)

    def layers(self, commit: str | None, request: Request, num_ranks: int) -> list[list[Call]] | None:
        """Return the calls of layers on each rank in the last step of a request; None if it cannot.

        Args:
            commit: None for the current code.

        Raises NothingToBisect for a commit that does not exist.
        """
        place = CURRENT if commit is None else self.checkout.switch(commit)
        report = self._ask("layers", place, request, num_ranks)
        return None if report is None else msgspec.convert(report["calls"], list[list[Call]])

    def _ask(self, task: str, place: Path, request: Request, num_ranks: int) -> dict[str, Any] | None:
        """Return the report of a task, None if it fails."""
        report = self.checkout.place.with_name("report.json")
        given = vars(absolute(request))  # an older commit may lack the members that are at their default
        changed = {one.name: given[one.name] for one in fields(request) if given[one.name] != one.default}
        asked = {"place": str(place), "report": str(report), "task": task, "request": changed}
        argv = [str(ON_COMMIT), json.dumps(asked)]
        environment = {"PYTHONPATH": str(place)}  # of processes that a rank starts
        log = report.with_name("ranks.log")
        code = self.ranks.run(argv, num_ranks, environment, log, echo=False, place=place)
        if code != 0:
            sys.stderr.write(log.read_text(errors="replace"))
        return json.loads(report.read_text()) if code == 0 else None


@contextmanager
def open_commits(repository: Path) -> Iterator[Commits]:
    """Start what replays commits of a repository; end it, also when a signal ends this process.

    Raises NothingToBisect for a folder without a repository.
    """
    with (
        checkout(repository) as place,
        warm_ranks(DETERMINISTIC, LIBRARIES, path=()) as ranks,
    ):
        yield Commits(place, ranks)


def search_commits(
    request: Request,
    repository: Path,
    good: str,
    bad: str,
    num_ranks: int,
    note: Callable[[str], None] = lambda line: None,
) -> BisectReport:
    """Find the commit from `good` to `bad` that changed the numbers of the request's steps.

    Args:
        note: called with a line for each commit that was replayed.

    Raises NothingToBisect, with the reason.
    """
    with open_commits(repository) as commits:

        def replay(commit: str, last: int) -> Numbers | None:
            numbers = commits.replay(commit, replace(request, last=last), num_ranks)
            steps = f"steps {request.first} to {last} replayed"
            note(f"{commit[:10]}  {'cannot replay it' if numbers is None else steps}")
            return numbers

        return find_commit(request.record, repository, good, bad, request.last, replay)


def absolute(request: Request) -> Request:
    """Return a request for a process in another folder: a model's folder that the record names
    relative to this one is given absolutely.
    """
    record = request.record if "://" in request.record else os.path.abspath(request.record)
    model = model_folder(open_record(record), request.model)
    return replace(
        request, record=record, model=os.path.abspath(model) if os.path.isdir(model) else request.model
    )


def layers_with_own_code(
    left: Record, right: Record, step: int, model: str | None, repository: Path
) -> LayersReport:
    """Replay a step of two records and find the first layer that differs.

    Args:
        model: folder of the runs' first weights; None for the one in each record.
        repository: has the commits of the records; a side whose commit it lacks, or whose commit
            cannot trace layers, replays with the current code.

    Raises:
        ReplayError, WrongModel: a record cannot be replayed up to this step.
    """
    records = (left, right)
    for record in records:
        step_range(record, step, step)
        check_recorded_results(record, "--layers")
        check_model(record, model, step)
    commits = [code_of(record.header).get("commit") for record in records]
    known = [commit if commit and has_commit(repository, commit) else None for commit in commits]
    with open_commits(repository) as ready:
        traces = [
            trace(ready, record, commit, step, model) for record, commit in zip(records, known, strict=True)
        ]
    (left_calls, left_commit), (right_calls, right_commit) = traces
    used = (left_commit, right_commit)
    report = compare_calls(step, left_calls, right_calls)
    current = tuple(side for side, commit in zip("AB", used, strict=True) if commit is None)
    file, line = report.file, report.line
    if report.name is not None and left_commit and right_commit:
        rank, index = report.rank, report.index
        functions = {*left_calls[rank][index].functions, *right_calls[rank][index].functions}
        file, line = changed_function(repository, left_commit, right_commit, functions) or (file, line)
    return replace(report, file=file, line=line, with_current_code=current)


def trace(
    ready: Commits, record: Record, commit: str | None, step: int, model: str | None
) -> tuple[list[list[Call]], str | None]:
    """Return the calls of a record's step, and the commit whose code ran; None is the current code.

    Raises ReplayError if neither can replay it.
    """
    request = Request(record.path, step, step, model)
    for code in dict.fromkeys((commit, None)):
        if (calls := ready.layers(code, request, record.header.world_size)) is not None:
            return calls, code
    raise ReplayError(f"{record.path} cannot be replayed up to step {step}: see the output above")


def changed_function(repository: Path, left: str, right: str, functions: set[str]) -> tuple[str, int] | None:
    """Return file and first changed line of the first function that two commits have differently.

    Args:
        functions: called in one of the commits, each as "file:line:name".
    """
    with sources(repository, left) as before, sources(repository, right) as after:
        for function in sorted(functions):
            path, _, name = function.split(":", 2)
            if name.split(".<locals>")[0] in changed_definitions(before.file(path), after.file(path)):
                definition = (path, name.split(".<locals>")[0])
                return path, first_changed_line(repository, left, right, after, definition)
    return None
