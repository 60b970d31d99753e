"""Print the report of `areal-debug check run`. Imports no torch."""

from rich.console import Console
from rich.table import Table

from areal_debug.render import format_number, styled
from replayer.preflight.repeats import PreflightReport

MARKS = {
    "ok": styled("[green]ok[/green]"),
    "note": styled("[yellow]note[/yellow]"),
    "problem": styled("[red]problem[/red]"),
}
SHOWN = 12


def print_preflight(out: Console, report: PreflightReport) -> None:
    """Print the verdict, the findings, and the noise floor if bits differ."""
    problems = len(report.problems)
    if report.identical and not problems:
        out.print(styled("[bold green]Deterministic:[/bold green] {} are bit-identical.", runs_of(report)))
        missed = 0.5 ** (report.num_runs - 1)
        out.print(
            styled("A difference in every second run would have been missed in {:.2g} %.", 100 * missed)
        )
    elif report.identical:
        out.print(
            styled(
                "[bold red]Not safe:[/bold red] {} are bit-identical, but {} problem{} below can make others differ.",
                runs_of(report),
                problems,
                "s" * (problems != 1),
            )
        )
    else:
        out.print(
            styled(
                "[bold red]Not deterministic:[/bold red] of {}, step {} differs in {} of {} values.",
                runs_of(report),
                report.step,
                len(report.differences),
                report.num_compared,
            )
        )
    out.print(findings_table(report))
    if report.noise:
        out.print()
        out.print(noise_table(report))
        if len(report.noise) > SHOWN:
            out.print(
                styled(
                    "... and {} parameters with less noise; --json lists all of them",
                    len(report.noise) - SHOWN,
                )
            )


def runs_of(report: PreflightReport) -> str:
    """Count runs and steps."""
    steps = "1 step" if report.num_steps == 1 else f"{report.num_steps} steps"
    return f"{report.num_runs} runs of {steps}"


def findings_table(report: PreflightReport) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in report.findings:
        table.add_row(
            MARKS[finding.status],
            finding.check,
            styled("{}", finding.seen),
            styled("{}", finding.next_step),
        )
    return table


def noise_table(report: PreflightReport) -> Table:
    table = Table(
        title="Noise floor of this machine in one step",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for heading in (
        "parameter",
        "weights that differ",
        "largest weight diff",
        "largest gradient diff",
        "relative",
    ):
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    for noise in report.noise[:SHOWN]:
        table.add_row(
            styled("{}", noise.name),
            f"{noise.num_different:,} of {noise.num_elements:,}",
            format_number(noise.weight),
            format_number(noise.gradient),
            f"{100 * noise.gradient_share:.2g} %",
        )
    return table
