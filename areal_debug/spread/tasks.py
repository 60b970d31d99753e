"""Run one verb on many records, steps or settings: a task each, here or on Ray.

    command       a task for each item: the verb's own arguments, for this item alone, with --json
    run_tasks()   runs them here (`places.py`), or on Ray (`on_ray.py`); outcomes in the same order
    run_verb()    a task, in this process or in a worker of Ray: the verb -> its report, or why not

A task is the verb itself: what it reads is confined as it is without Ray, and its report is that of
the same command for one item.
"""

import contextlib
import io
import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

ERROR = "Error: "  # before the sentence that ends a verb, on standard error


@dataclass(frozen=True)
class Task:
    """One call of a verb; `arguments` are those of `areal-debug`. `num_cpus` processes compute."""

    name: str
    arguments: tuple[str, ...]
    num_cpus: int = 1


@dataclass(frozen=True)
class Outcome:
    """What came of a task: its exit code, and its report or the sentence that ended it.

    `num_retries` counts how often its worker died.
    """

    exit_code: int
    report: Any = None
    error: str | None = None
    num_retries: int = 0


def run_verb(arguments: Sequence[str]) -> Outcome:
    """Run a verb with --json in this process, and return what it printed; no exception leaves it.

    Raises KeyboardInterrupt.
    """
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code, why = exit_code_of(arguments)
    try:
        return Outcome(code, report=json.loads(printed.getvalue()))
    except ValueError:
        sentence = errors.getvalue().rpartition(ERROR)[2].strip()
        return Outcome(code or 2, error=why or sentence or f"it ended with exit code {code} and no report")


def exit_code_of(arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run a verb; return its exit code, and the sentence for an error that it has not printed."""
    from areal_debug.cli import main
    from areal_debug.terminal import INTERRUPTED

    try:
        code = main.main([*arguments], prog_name="areal-debug", standalone_mode=False)
    except click.ClickException as error:
        return error.exit_code, error.format_message()
    except SystemExit as end:
        code = end.code
    except Exception as error:  # the other tasks go on; a defect is named in the report
        traceback.print_exc()
        return 2, f"{type(error).__name__}: {error}"
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0 if code is None else 1, None


def arguments_of(context: click.Context, changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments that call the running verb again, with some parameters changed.

    Args:
        changes: values by the parameters' names; None leaves an option out.
    """
    verb: list[str] = []
    above: click.Context | None = context
    while above is not None and above.parent is not None:
        verb.insert(0, str(above.info_name))
        above = above.parent
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
    return (*verb, *options, "--", *arguments)
