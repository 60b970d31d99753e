"""The tasks of a verb that checks one step of a record: one for each chosen step."""

import re
from collections.abc import Sequence
from os import PathLike
from typing import Any

import click

from areal_debug.spread.tasks import Task, arguments_of


def step_tasks(record: str | PathLike[str], step_range: str | None, step: Any) -> list[Task]:
    """Return a task for each step of a range, by default for all, of the running verb.

    Args:
        step: the verb's own option for steps, which excludes a range.

    Raises:
        ValueError: the range cannot be read, or has no recorded step.
        RecordError, DamagedRecord: of the record.
    """
    if step not in (None, ()):
        raise ValueError("--step is for one report and --steps for one of each step: give one of them")
    spread = {"place": None, "workers": None, "step_range": None, "as_json": True}
    context = click.get_current_context()
    name = next(name for name in context.params if name in ("step", "steps"))
    return [
        Task(f"step {number}", arguments_of(context, spread | {name: (number,)}))
        for number in steps_in(record, step_range or ":")
    ]


def steps_in(record: str | PathLike[str], step_range: str) -> list[int]:
    from recorder import open_record
    from recorder.archive.confined import in_child

    in_range([], step_range)  # before the record is read
    steps: list[int] = in_child(lambda: [*open_record(record).steps], [record])
    chosen = in_range(steps, step_range)
    if not chosen:
        has = f"its {len(steps)} steps are from {steps[0]} to {steps[-1]}" if steps else "it holds no step"
        raise ValueError(f"--steps {step_range}: {record} has no such step; {has}")
    return chosen


def in_range(steps: Sequence[int], step_range: str) -> list[int]:
    """Return those of the steps that are in a range `A:B`. Raises ValueError."""
    match = re.fullmatch(r"(\d*):(\d*)", step_range)
    if match is None:
        raise ValueError(f"--steps {step_range}: give A:B, steps from A up to and without B, or : for all")
    low, high = (int(number) if number else None for number in match.groups())
    return [step for step in steps if (low is None or step >= low) and (high is None or step < high)]
