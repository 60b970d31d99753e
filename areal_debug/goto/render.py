"""The options and the report of `areal-debug goto`. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from areal_debug.render import styled

if TYPE_CHECKING:
    from replayer.goto import GotoReport


@dataclass(frozen=True)
class GotoOptions:
    """The options of the command. `do` is "shell", "pdb" or "" for neither."""

    stage: str = "batch"
    do: str = ""
    pdb_rank: int = 0
    model: str | None = None
    save: str | None = None
    keep_going: bool = False
    as_json: bool = False


def print_report(out: Console, report: "GotoReport") -> None:
    """Print whether the step was reached bit-identically, and from which checkpoint."""
    start = "the run's first weights" if report.anchor is None else f"the anchor of step {report.anchor}"
    count = len(report.replayed)
    path = f"from {start}, {count} step{'s' * (count != 1)} replayed"
    first = report.first_different
    if report.faithful:
        weights = (
            f"; all {report.num_parameters} parameters before it have the recorded checksums"
            if report.num_parameters
            else ""
        )
        out.print(
            styled(
                "[bold green]At step {}[/bold green] ({}): {}, all bit-identical{}.",
                report.step,
                report.stage,
                path,
                weights,
            )
        )
        return
    if first is not None:
        reached = "continued to" if report.reached else "stopped before"
        out.print(
            styled(
                "[bold red]Not faithful:[/bold red] step {} differs from its record in {} values; {} step {}. {}.",
                first.step,
                len(first.differences),
                reached,
                report.step,
                path,
            )
        )
    elif report.wrong_parameters:
        named = ", ".join(report.wrong_parameters[:3])
        out.print(
            styled(
                "[bold red]Not faithful:[/bold red] {} parameters before step {} differ from their recorded checksums: {}. {}.",
                len(report.wrong_parameters),
                report.step,
                named,
                path,
            )
        )
    out.print(
        "Next: `areal-debug replay` from there reports what was set differently; --keep-going continues in spite of it."
    )
