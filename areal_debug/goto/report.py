"""The options and the report of `areal-debug goto`. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_debug.render import count
from areal_debug.report.model import Facts, Report, Row, rows_of

if TYPE_CHECKING:
    from replayer.goto import GotoReport
    from replayer.request import Summation


@dataclass(frozen=True)
class GotoOptions:
    """The options of the command.

    `do` is "shell", "pdb" or "" for neither; `virtual` as in Request.
    """

    stage: str = "batch"
    do: str = ""
    pdb_rank: int = 0
    model: str | None = None
    save: str | None = None
    keep_going: bool = False
    as_json: bool = False
    virtual: "Summation" = ""


def report_of(report: "GotoReport") -> Report:
    """Return whether the step was reached bit-identically, and from which checkpoint."""
    start = "the run's first weights" if report.anchor is None else f"the anchor of step {report.anchor}"
    path = f"from {start}, {count(len(report.replayed), 'step')} replayed"
    first, own = report.first_different, rows_of("own code", list(map(str, report.own_code)))
    if report.faithful:
        place = f"At step {report.step} ({report.stage})"
        if not report.replayed and not report.num_parameters:
            return Report(
                place, f"from {start}; the record has nothing before it to compare with.", "", [Facts(own)]
            )
        weights = f"; all {report.num_parameters} parameters before it have the recorded checksums"
        checked = weights if report.num_parameters else ""
        return Report(place, f"{path}, all bit-identical{checked}.", "good", [Facts(own)])
    if first is not None:
        reached = "continued to" if report.reached else "stopped before"
        differs = f"step {first.step} differs from its record in {len(first.differences)} values"
        sentence = f"{differs}; {reached} step {report.step}. {path}."
    else:
        named = ", ".join(report.wrong_parameters[:3])
        wrong = f"{len(report.wrong_parameters)} parameters before step {report.step}"
        sentence = f"{wrong} differ from their recorded checksums: {named}. {path}."
    next_step = "`areal-debug replay` from there reports what was set differently; --keep-going continues in spite of it."
    return Report("Not faithful", sentence, "bad", [Facts([*own, Row("next", next_step)])])
