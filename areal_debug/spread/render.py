"""Print what came of the tasks of a verb: the verdict, a line for each, lost and failed ones."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from rich.table import Table

from areal_debug.render import console, count, print_json, styled
from areal_debug.spread.places import run_tasks
from areal_debug.spread.tasks import Outcome, Task

WORDS = {1: ("problem found", "red"), 2: ("inconclusive", "yellow")}  # of exit codes
Columns = Callable[[Any], Mapping[str, str]]  # of a report: column and text


def report_tasks(
    noun: str,
    tasks: Sequence[Task],
    place: str | None,
    workers: int | None,
    columns: Columns,
    as_json: bool,
    done: str = "healthy",
) -> NoReturn:
    """Run the tasks, print the report, and exit: 1 if a problem was found, else 2 if inconclusive.

    Args:
        noun: what a task is about, such as "step".
        columns: what a line of the table has of a task's report.
        done: the word for a task in which nothing was found.
    """
    outcomes = run_tasks(f"{noun}s", tasks, place, workers)
    if as_json:
        print_json(document(tasks, outcomes))
    else:
        print_outcomes(noun, tasks, outcomes, columns, done)
    codes = {outcome.exit_code for outcome in outcomes}
    raise SystemExit(1 if 1 in codes else 0 if codes <= {0} else 2)


def document(tasks: Sequence[Task], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the facts: the outcome of each task in order, and which were run again."""
    facts = [{"name": task.name} | asdict(outcome) for task, outcome in zip(tasks, outcomes, strict=True)]
    retries = {fact["name"]: number for fact in facts if (number := fact.pop("num_retries"))}
    return {"tasks": facts, "retries": retries}


def print_outcomes(
    noun: str, tasks: Sequence[Task], outcomes: Sequence[Outcome], columns: Columns, done: str
) -> None:
    """Print the verdict, a table of the reports, why tasks failed, and the next command."""
    out, words = console(), WORDS | {0: (done, "green")}
    kinds = [min(outcome.exit_code, 2) for outcome in outcomes]
    found = "; ".join(f"{kinds.count(kind)} {words[kind][0]}" for kind in (1, 2, 0) if kind in kinds)
    colour = next(words[kind][1] for kind in (1, 2, 0) if kind in kinds)
    out.print(styled(f"[bold {colour}]{{}}:[/bold {colour}] {{}}", count(len(tasks), noun), found))
    lines = list(zip(tasks, outcomes, [words[kind] for kind in kinds], strict=True))
    rows = [(line, columns(line[1].report)) for line in lines if line[1].error is None]
    if rows:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in (noun, "", *rows[0][1]):
            table.add_column(heading, overflow="fold")
        for (task, _, (word, style)), cells in rows:
            texts = [styled("{}", text) for text in cells.values()]
            table.add_row(styled("{}", task.name), styled(f"[{style}]{{}}[/{style}]", word), *texts)
        out.print(table)
    for task, outcome, (word, _) in lines:
        if outcome.error is not None:
            out.print(styled("{}: {}: {}", task.name, word, outcome.error))
        if outcome.num_retries:
            times = count(outcome.num_retries, "time")
            out.print(styled("{}: its worker died, and it was run again, {}", task.name, times))
    first = next((task for task, outcome, _ in lines if outcome.exit_code), None)
    if first is not None:
        arguments = [word for word in first.arguments if word not in ("--json", "--")]
        out.print(styled("Next  {}", shlex.join(["areal-debug", *arguments])))
