"""Find the layer in which two runs diverge: each side replays with the code of its own commit."""

from dataclasses import replace
from pathlib import Path

from recorder import Record
from replayer.commits.acting import changed_definitions, first_changed_line
from replayer.commits.layers import Call, LayersReport, compare_calls
from replayer.commits.outside import code_of
from replayer.commits.references import sources
from replayer.commits.repository import has_commit
from replayer.commits.warm import Commits, open_commits
from replayer.errors import ReplayError
from replayer.preconditions import check_model, check_recorded_results, step_range
from replayer.request import Request


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
        check_model(record, model or record.header.config["actor"]["path"], step)
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
