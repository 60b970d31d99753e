"""`areal-debug replay --sweep OPTION=A,B,...`: a what-if replay for each value, side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from areal_debug.render import console, print_json
from areal_debug.replay.report import FIRST_STATISTICS, curves_of
from areal_debug.report.model import Table
from areal_debug.report.terminal import print_block
from replayer.check import ReplayReport
from replayer.request import Request

COMMA = re.compile(r",(?![^\[{(]*[\]})])")  # between values, not within a list


def requests_of(request: Request, sweeps: Sequence[str]) -> dict[str, Request]:
    """Return a request for each combination of values by name; ValueError for no sweep."""
    return {
        " ".join(settings): replace(request, settings=(*request.settings, *settings))
        for settings in product(*map(settings_of, sweeps))
    }


def settings_of(sweep: str) -> list[str]:
    """Return `OPTION=VALUE` for each value of `OPTION=A,B,...`."""
    option, equals, values = sweep.partition("=")
    if not option or not equals or not values:
        raise ValueError(
            f"--sweep {sweep}: give an option and its values, such as actor.eps_clip=0.1,0.2,0.3"
        )
    return [f"{option}={value}" for value in dict.fromkeys(COMMA.split(values))]


def print_sweep(reports: Mapping[str, ReplayReport], as_json: bool) -> None:
    """Print a line for each setting, with the means of the main statistics, recorded -> replayed."""
    if as_json:
        print_json(
            {"tasks": [{"name": name, "report": report.to_dict()} for name, report in reports.items()]}
        )
        return
    rows = {name: columns(report) for name, report in reports.items()}
    headings = list(dict.fromkeys(heading for row in rows.values() for heading in row))
    cells = [[name, *(row.get(heading, "-") for heading in headings)] for name, row in rows.items()]
    print_block(console(), Table(("setting", *headings), cells))


def columns(report: ReplayReport) -> dict[str, str]:
    shown = {}
    for curve in curves_of(report):
        if curve.name in FIRST_STATISTICS:
            means = (sum(values) / len(values) for values in (curve.recorded, curve.replayed))
            name = curve.name.removesuffix("/avg").split("/")[-1]
            shown[name] = " -> ".join(f"{mean:.4g}" for mean in means)
    return shown
