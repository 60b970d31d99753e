"""Replay a record with the code of commits, in a private checkout and without a new interpreter.

A commit whose code is older than what `warm_server` calls replays with its own command.
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
from areal_core.launch.processes import thread_limits
from replayer.commits.bisect import BisectReport, Numbers, find_commit, parse_numbers
from replayer.commits.checkout import Checkout, checkout
from replayer.commits.layers import Call
from replayer.commits.warm_server import TOO_OLD
from replayer.request import Request

CURRENT = Path(__file__).parents[2]  # this checkout
SERVER = Path(__file__).with_name("warm_server.py")
COMMAND = (sys.executable, "-c", "from areal_debug.cli import main; main()", "replay")


@dataclass
class Commits:
    """The commits of a repository, ready to replay; `server` has imported the libraries."""

    checkout: Checkout
    server: "subprocess.Popen[str]"

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
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        report = self.checkout.place.with_name("report.json")
        asked = {"place": str(place), "report": str(report), "task": task, "num_ranks": num_ranks}
        self.server.stdin.write(json.dumps(asked | {"request": changed_members(absolute(request))}) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        code = json.loads(answer)["code"] if answer else 1
        return code, json.loads(report.read_text()) if code == 0 else None


@contextmanager
def open_commits(repository: Path) -> Iterator[Commits]:
    """Start what replays commits of a repository; end it, also when a signal ends this process.

    Raises NothingToBisect for a folder without a repository.
    """
    environment = os.environ | thread_limits(1) | DETERMINISTIC
    environment.pop("PYTHONPATH", None)
    # a test whether there is a GPU must not initialise it before the fork
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    command = [sys.executable, "-P", str(SERVER)]
    with (
        checkout(repository) as place,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as server,
    ):
        try:
            yield Commits(place, server)
        finally:
            server.terminate()  # its ranks end with it


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
    """Return a request for a process in another folder."""
    record = request.record if "://" in request.record else os.path.abspath(request.record)
    return replace(request, record=record, model=request.model and os.path.abspath(request.model))


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
