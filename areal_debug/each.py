"""One call of a verb for each of several steps or records, in turn, and one report of them all.

A call is the verb itself with --json: what it reads is confined as ever, and its report is that of
the same command for one item. On many cores or machines the shell runs them: `xargs -P`, or a task
of Ray that calls `areal-debug`.
"""

import contextlib
import io
import json
import re
import shlex
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from areal_debug.render import console, count, print_json, with_progress
from areal_debug.report.model import Cell, Facts, Level, Report, Row, Table
from areal_debug.report.terminal import print_report

ERROR = "Error: "  # before the sentence that ends a verb, on standard error
WORDS: dict[int, tuple[str, Level]] = {
    0: ("healthy", "good"),
    1: ("problem found", "bad"),
    2: ("inconclusive", "unsure"),
}  # of exit codes


@dataclass(frozen=True)
class Outcome:
    """What came of a call: its exit code, and its report or the sentence that ended it."""

    exit_code: int
    report: Any = None
    error: str | None = None


def steps_in(record: str | PathLike[str], step_range: str) -> list[int]:
    """Return the recorded steps of a range `A:B`. Raises ValueError."""
    from recorder import open_record

    match = re.fullmatch(r"(\d*):(\d*)", step_range)
    if match is None:
        raise ValueError(f"--steps {step_range}: give A:B, steps from A up to and without B, or : for all")
    low, high = (int(number) if number else None for number in match.groups())
    steps = open_record(record).steps
    chosen = [step for step in steps if (low is None or step >= low) and (high is None or step < high)]
    if not chosen:
        has = f"its {len(steps)} steps are from {steps[0]} to {steps[-1]}" if steps else "it holds no step"
        raise ValueError(f"--steps {step_range}: {record} has no such step; {has}")
    return chosen


def report_each_step(
    record: str | PathLike[str], step_range: str, columns: Callable[[Any], Mapping[str, str]], as_json: bool
) -> NoReturn:
    """Run the verb for each step, print a line for each, and exit: 1 if a problem was found, else 2
    if one was inconclusive.

    Args:
        columns: what a line of the table has of a step's report.
    """
    context = click.get_current_context()
    option = next(name for name in context.params if name in ("step", "steps"))
    if context.params[option] not in (None, ()):
        raise ValueError("--step is for one report and --steps for one of each step: give one of them")
    calls = {
        f"step {number}": arguments_of({option: (number,), "step_range": None, "as_json": True})
        for number in steps_in(record, step_range)
    }
    outcomes = run_each(calls)
    if as_json:
        print_json(document(outcomes))
    else:
        print_report(console(), report_of("step", calls, outcomes, columns))
    codes = {outcome.exit_code for outcome in outcomes.values()}
    raise SystemExit(1 if 1 in codes else 0 if codes <= {0} else 2)


def run_each(calls: Mapping[str, Sequence[str]]) -> dict[str, Outcome]:
    """Run each call of `areal-debug` in this process; one that fails does not end the others."""

    def run_all(tick: Callable[[object], None]) -> dict[str, Outcome]:
        outcomes = {}
        for name, arguments in calls.items():
            outcomes[name] = run_verb(arguments)
            tick(name)
        return outcomes

    return with_progress("running", len(calls), run_all)


def run_verb(arguments: Sequence[str]) -> Outcome:
    """Run a verb with --json, and return what it printed; no exception leaves it.

    Raises KeyboardInterrupt.
    """
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code, why = exit_code_of(arguments)
    return printed_outcome(code, printed.getvalue(), errors.getvalue(), why)


def printed_outcome(code: int, printed: str, errors: str, why: str | None = None) -> Outcome:
    """Return the report in what a verb printed, else the sentence that ended it, `why` if known."""
    try:
        return Outcome(code, report=json.loads(printed))
    except ValueError:
        sentence = errors.rpartition(ERROR)[2].strip()
        return Outcome(code or 2, error=why or sentence or f"it ended with exit code {code} and no report")


def exit_code_of(arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run a verb; return its exit code, and the sentence for an error that it has not printed."""
    from areal_debug.cli import main
    from areal_debug.streams import INTERRUPTED

    try:
        code = main.main([*arguments], prog_name="areal-debug", standalone_mode=False)
    except click.ClickException as error:
        return error.exit_code, error.format_message()
    except SystemExit as end:
        code = end.code
    except Exception as error:  # the other calls go on; a defect is named in the report
        traceback.print_exc()
        return 2, f"{type(error).__name__}: {error}"
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0 if code is None else 1, None


def arguments_of(changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments that call the running verb again, with some parameters changed.

    Args:
        changes: values by the parameters' names; None leaves an option out.
    """
    context = click.get_current_context()
    options: list[str] = []
    arguments: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if not parameter.expose_value:
            continue
        if name not in changes and context.get_parameter_source(name) != ParameterSource.COMMANDLINE:
            continue
        value = changes[name] if name in changes else context.params[name]
        values = value if isinstance(value, tuple) else () if value in (None, False) else (value,)
        if isinstance(parameter, click.Option):
            option = max(parameter.opts, key=len)
            options += [option if parameter.is_flag else f"{option}={each}" for each in values]
        else:
            arguments += map(str, values)
    return (*context.command_path.split()[1:], *options, "--", *arguments)


def document(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return the facts: the outcome of each call in order."""
    return {"tasks": [{"name": name} | asdict(outcome) for name, outcome in outcomes.items()]}


def report_of(
    noun: str,
    calls: Mapping[str, Sequence[str]],
    outcomes: Mapping[str, Outcome],
    columns: Callable[[Any], Mapping[str, str]],
) -> Report:
    """Return a line for each call, why some failed, and the next command."""
    kinds = {name: min(outcome.exit_code, 2) for name, outcome in outcomes.items()}
    counts = list(kinds.values())
    found = "; ".join(f"{counts.count(kind)} {WORDS[kind][0]}" for kind in (1, 2, 0) if kind in counts)
    level = next(WORDS[kind][1] for kind in (1, 2, 0) if kind in counts)
    cells = {name: columns(outcome.report) for name, outcome in outcomes.items() if outcome.error is None}
    headings = [noun, "", *next(iter(cells.values()), {})]
    table = Table(headings, [[name, Cell(*WORDS[kinds[name]]), *row.values()] for name, row in cells.items()])
    rows = [
        Row(name, outcome.error, WORDS[kinds[name]][1]) for name, outcome in outcomes.items() if outcome.error
    ]
    first = next((name for name, outcome in outcomes.items() if outcome.exit_code), None)
    if first is not None:
        words = [word for word in calls[first] if word not in ("--json", "--")]
        rows.append(Row("next", shlex.join(["areal-debug", *words]), is_code=True))
    return Report(count(len(calls), noun), found, level, [*([table] if cells else []), Facts(rows)])
