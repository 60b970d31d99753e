"""The tasks of a verb that takes one record: one for each of several records."""

import os
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import click

from areal_debug.spread.tasks import Task, arguments_of


def record_tasks(
    records: Sequence[str | PathLike[str]],
    changes: Callable[[str], dict[str, Any]],
) -> list[Task]:
    """Return a task of the running verb for each record, in the given order.

    Args:
        changes: parameters of the verb for one record: the record, and what else depends on it.

    Raises ValueError for a record that is given twice.
    """
    names = [str(record) for record in records]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is given {names.count(twice)} times: give each record once")
    spread = {"place": None, "workers": None, "as_json": True}
    context = click.get_current_context()
    return [Task(name, arguments_of(context, spread | changes(name))) for name in names]


def places_below(records: Sequence[str | PathLike[str]], destination: str) -> dict[str, str]:
    """Return a place below the destination for each record: its path below the folder of all."""
    names = [str(record) for record in records]
    above = os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in names])
    return {name: f"{destination.rstrip('/')}/{os.path.relpath(name, above)}" for name in names}
