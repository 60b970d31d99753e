"""Replay a record with the code of commits, in a private checkout and without a new interpreter.

Each replay is a fork of a process that has imported other packages and nothing of ours, and runs
`on_commit.py` there. A commit whose code is older than what that calls replays with its own
command.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from areal_core.environment import DETERMINISTIC
from areal_core.launch.warm import LIBRARIES, WarmRanks, warm_ranks
from recorder import open_record
from replayer.commits.bisect import BisectReport, Numbers, find_commit, parse_numbers
from replayer.commits.checkout import Checkout, checkout
from replayer.commits.layers import Call
from replayer.commits.on_commit import TOO_OLD
from replayer.request import Request

CURRENT = Path(__file__).parents[2]  # this checkout
ON_COMMIT = Path(__file__).with_name("on_commit.py")
COMMAND = (sys.executable, "-c", "from areal_debug.cli import main; main()", "replay")


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
        code, report = self._ask("replay", place, request, num_ranks)
        if code == TOO_OLD:
            return replay_with(place, request)
        return None if report is None else parse_numbers(report)

    def layers(self, commit: str | None, request: Request, num_ranks: int) -> list[list[Call]] | None:
        """Return the calls of layers on each rank in the last step of a request; None if it cannot.

        Args:
            commit: None for the current code.

        Raises NothingToBisect for a commit that does not exist.
        """
        place = CURRENT if commit is None else self.checkout.switch(commit)
        _, report = self._ask("layers", place, request, num_ranks)
        if report is None:
            return None
        return [
            [Call(**(call | {"functions": tuple(call["functions"])})) for call in calls]
            for calls in report["calls"]
        ]

    def _ask(
        self, task: str, place: Path, request: Request, num_ranks: int
    ) -> tuple[int, dict[str, Any] | None]:
        """Return the exit code of a task, and its report if that is 0."""
        report = self.checkout.place.with_name("report.json")
        asked = {"place": str(place), "report": str(report), "task": task}
        argv = [str(ON_COMMIT), json.dumps(asked | {"request": changed_members(absolute(request))})]
        environment = {"PYTHONPATH": str(place)}  # of processes that a rank starts
        log = report.with_name("ranks.log")
        code = self.ranks.run(argv, num_ranks, environment, log, echo=False, place=place)
        if code != 0:
            sys.stderr.write(log.read_text(errors="replace"))
        return code, json.loads(report.read_text()) if code == 0 else None


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


def changed_members(request: Request) -> dict[str, Any]:
    """Return the members that are not at their default: an older commit may lack the others."""
    return {
        member.name: value
        for member in fields(request)
        if (value := getattr(request, member.name)) != member.default
    }


def absolute(request: Request) -> Request:
    """Return a request for a process in another folder: a model's folder that the record names
    relative to this one is given absolutely.
    """
    record = request.record if "://" in request.record else os.path.abspath(request.record)
    model = request.model or open_record(record).header.config["actor"]["path"]
    return replace(
        request, record=record, model=os.path.abspath(model) if os.path.isdir(model) else request.model
    )


def replay_with(place: Path, given: Request) -> Numbers | None:
    """Replay with a checkout's own command; None if that fails."""
    request = absolute(given)
    steps = ("--from-step", str(request.first), "--to-step", str(request.last), "--json")
    model = ("--model", request.model) if request.model else ()
    environment = os.environ | {"PYTHONPATH": str(place)}
    command = [*COMMAND, request.record, *steps, *model]
    done = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        return parse_numbers(json.loads(done.stdout))
    except (json.JSONDecodeError, KeyError, TypeError):
        return None  # an error on stderr in place of a report
