"""Print the report of `areal-debug rollout-sim`."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from areal_debug.render import format_seconds, styled

if TYPE_CHECKING:
    from areal_debug.rollout_sim.simulate import SimulationReport


def print_simulation(out: Console, report: "SimulationReport", problems: list[str]) -> None:
    """Print the verdict and the numbers."""
    subject = f"{report.requests:,} requests on {report.servers} simulated servers"
    if problems:
        out.print(styled("[bold red]Not as required:[/bold red] {}: {}.", subject, "; ".join(problems)))
    else:
        out.print(
            styled("[bold green]Fine:[/bold green] {}: none lost, none doubled, none too old.", subject)
        )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in facts(report):
        table.add_row(name, text)
    out.print(table)


def facts(report: "SimulationReport") -> list[tuple[str, str]]:
    """Return the rows of the report: name and text."""
    return [
        ("lost", f"{report.lost}"),
        ("doubled", f"{report.doubled}"),
        ("oldest_version_lag", f"{report.oldest_version_lag}, the bound is {report.staleness_bound}"),
        (
            "max_lag_ms",
            f"{report.max_lag_ms:.0f}, with waits for a core {report.max_lag_with_waits_ms:.0f}",
        ),
        ("cpu_s", f"{report.cpu_s:.1f}, in {format_seconds(report.wall_s)}"),
        ("requests_per_s", f"{report.requests_per_s:.0f} a second of CPU time"),
        (
            "events",
            f"{report.replies:,} replies, {report.aborted:,} of them aborted by {report.updates} weight updates; "
            f"{report.deaths} deaths",
        ),
        ("peak memory", f"{report.peak_memory_mb:.0f} MB"),
    ]
