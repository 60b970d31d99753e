"""What `areal-debug preflight` says. Imports no torch."""

from rich.console import Console
from rich.table import Table

from areal_debug.render import escaped, format_number
from replayer.twice import PreflightReport

MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "problem": "[red]problem[/red]"}
SHOWN = 12


def print_preflight(out: Console, report: PreflightReport) -> None:
    """Verdict, findings, and where bits differ the machine's own noise."""
    problems = len(report.problems)
    if report.identical and not problems:
        out.print("[bold green]Deterministic:[/bold green] one step taken twice has the same bits.")
    elif report.identical:
        out.print(
            f"[bold red]Not safe:[/bold red] one step taken twice has the same bits, by luck of this step: "
            f"{problems} problem{'s' * (problems != 1)} below can change them."
        )
    else:
        out.print(
            f"[bold red]Not deterministic:[/bold red] one step taken twice differs in {len(report.differences)} of "
            f"{report.num_compared} values."
        )
    out.print(findings_table(report))
    if report.noise:
        out.print()
        out.print(noise_table(report))
        if len(report.noise) > SHOWN:
            out.print(f"... and {len(report.noise) - SHOWN} parameters with less; --json has all of them")


def findings_table(report: PreflightReport) -> Table:
    """One row a finding, with what to do."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in report.findings:
        table.add_row(MARKS[finding.status], finding.check, escaped(finding.seen), escaped(finding.next_step))
    return table


def noise_table(report: PreflightReport) -> Table:
    """The parameters that differ, noisiest first."""
    table = Table(
        title="This machine's own noise in one step",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for heading in (
        "parameter",
        "weights that differ",
        "farthest weight",
        "farthest gradient",
        "of the largest",
    ):
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    for noise in report.noise[:SHOWN]:
        table.add_row(
            escaped(noise.name),
            f"{noise.num_different:,} of {noise.num_elements:,}",
            format_number(noise.weight),
            format_number(noise.gradient),
            f"{100 * noise.gradient_share:.2g} %",
        )
    return table
