"""Print what a reward function pays for."""

from rich.table import Table

from areal_core.safety.printable import printable
from areal_debug.render import console, format_number, styled
from areal_debug.reward.probe import Finding, ProbeReport

LONGEST_EXAMPLE = 70
STYLES = {"problem": "red", "sound": "green", "unknown": "yellow"}
WORDS = {"problem": "Pays for what is wrong", "sound": "Sound", "unknown": "Inconclusive"}


def print_probe(report: ProbeReport) -> None:
    """Print the verdict, the table of kinds of answers, and the notes."""
    out = console()
    out.print(
        styled(
            f"[bold {STYLES[report.verdict]}]{{}}:[/] {{}}: {{}}",
            WORDS[report.verdict],
            report.function,
            report.sentence,
        )
    )
    if report.right is not None and report.wrong is not None:
        out.print(
            styled(
                "{} for a right answer, {} for a wrong one; right answers are paid as: {}",
                format_number(report.right),
                format_number(report.wrong),
                ", ".join(report.formats),
            )
        )
    out.print(styled("[dim]{} calls on {} rows of {}[/dim]", report.num_calls, report.num_rows, report.data))
    out.print()
    out.print(table_of(report.findings))
    for text in report.notes:
        out.print(styled("[yellow]note[/yellow]: {}", text))


def table_of(findings: tuple[Finding, ...]) -> Table:
    """Make a table with a row per kind of answers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("answer", "verdict"):
        table.add_column(heading)
    for heading in ("paid", "failed", "mean"):
        table.add_column(heading, justify="right")
    table.add_column("for example")
    for found in findings:
        style = "red" if found.is_problem else "dim" if found.verdict == "ok" else "yellow"
        shown = printable(found.example, LONGEST_EXAMPLE)
        table.add_row(
            styled("{}", found.kind),
            styled(f"[{style}]{{}}[/]", found.verdict),
            f"{found.paid} of {found.tried}",
            str(found.failed) if found.failed else "",
            "" if found.mean_reward is None else f"{found.mean_reward:.3g}",
            styled("{!r} {}", shown, f"({found.failure})" if found.failure else "")
            if found.verdict != "ok"
            else "",
        )
    return table
