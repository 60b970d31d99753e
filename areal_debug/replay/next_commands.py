"""The commands that continue from a replay that differs from its record. Imports no torch."""

import shlex

from recorder.difference import Difference
from replayer.check import ReplayReport
from replayer.request import Request


def next_commands(report: ReplayReport, request: Request) -> list[str]:
    """Return the commands to run next, none if nothing is to be explained.

    They name the record as the request does, so they work in the folder in which it worked.
    """
    first, kind = report.first_different, report.guarantee.kind
    is_within = report.verdict is not None and report.verdict.finding == "within"
    if first is None or is_within or kind in ("changed", "unrecorded"):
        return []
    model = [] if request.model is None else ["--model", request.model]
    replayed = [] if request.record_to is None else [request.record_to]
    commands = [["areal-debug", "why", request.record, *replayed, *model]]
    if request.record_to is not None:
        commands.append(["areal-debug", "diff", request.record, request.record_to, "--step", str(first.step)])
    commit, changes = (code_difference(report, name) for name in ("commit", "dirty_sha256"))
    if commit is not None and commit.recorded and commit.current:
        revisions = ["--good", commit.recorded[:12], "--bad", commit.current[:12]]
        steps = ["--to-step", str(first.step)]
        commands.append(["areal-debug", "bisect", request.record, *revisions, *steps, *model])
    elif commit is None and changes is not None:
        commands.append(["git", "diff", "HEAD"])
    at = first.step if report.weights_diverge_at is None else report.weights_diverge_at
    commands.append(["areal-debug", "goto", request.record, "--step", str(at), *model, "--shell"])
    return [shlex.join(command) for command in commands]


def code_difference(report: ReplayReport, name: str) -> Difference | None:
    """Return a member of the trainer's code that differs between the record and this machine."""
    found = () if report.set_differently is None else report.set_differently.environment
    return next((item for item in found if item.where == f"code.{name}"), None)
