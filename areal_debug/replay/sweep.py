"""`areal-debug replay --sweep OPTION=A,B,...`: a what-if replay for each value, side by side."""

import re
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NoReturn

import click

from areal_debug.replay.render import FIRST_STATISTICS, curves_of
from areal_debug.spread.render import report_tasks
from areal_debug.spread.tasks import Task, arguments_of
from replayer.check import parse_report
from replayer.request import replay_config

if TYPE_CHECKING:
    from recorder import Record

COMMA = re.compile(r",(?![^\[{(]*[\]})])")  # between values, not within a list


def run_sweep(
    record: "Record",
    model: str | None,
    config: str | None,
    nproc: int | None,
    sweeps: Sequence[str],
    overrides: Sequence[str],
    place: str | None,
    workers: int | None,
    as_json: bool,
) -> NoReturn:
    """Replay once for each combination of values, and print a line for each.

    Raises ValueError for what is no sweep, ConfigError for a value that its option refuses.
    """
    context = click.get_current_context()
    spread = {"sweeps": (), "place": None, "workers": None, "as_json": True}
    tasks = []
    for combination in product(*map(settings_of, sweeps)):
        changed = (*overrides, *combination)
        replay_config(record, model, changed, config)
        arguments = arguments_of(context, spread | {"settings": (), "overrides": changed})
        tasks.append(Task(" ".join(combination), arguments, nproc or record.header.world_size))
    report_tasks("setting", tasks, place, workers, columns, as_json, "replayed")


def settings_of(sweep: str) -> list[str]:
    """Return `OPTION=VALUE` for each value of `OPTION=A,B,...`."""
    option, equals, values = sweep.partition("=")
    if not option or not equals or not values:
        raise ValueError(
            f"--sweep {sweep}: give an option and its values, such as actor.eps_clip=0.1,0.2,0.3"
        )
    return [f"{option}={value}" for value in dict.fromkeys(COMMA.split(values))]


def columns(report: dict[str, Any]) -> dict[str, str]:
    """Return the means of the main statistics over the steps, recorded -> replayed."""
    means = {
        curve.name: [sum(values) / len(values) for values in (curve.recorded, curve.replayed)]
        for curve in curves_of(parse_report(report))
        if curve.name in FIRST_STATISTICS
    }
    shown = {name: " -> ".join(f"{mean:.4g}" for mean in pair) for name, pair in means.items()}
    return {"/".join(name.removesuffix("/avg").split("/")[-1:]): text for name, text in shown.items()}
