"""Print what a reward function pays for."""

from rich.table import Table

from areal_core.safety.printable import printable
from areal_debug.render import console, format_number, styled
from areal_debug.report.links import view_command
from areal_debug.reward.probe import Finding, ProbeReport
from areal_debug.reward.rescore import RescoreReport

LONGEST_EXAMPLE = 70
MOST_STEPS, MOST_ROWS = 20, 10
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


def print_rescore(report: RescoreReport) -> None:
    """Print the verdict, a table of the steps with disagreements, and ten samples of each kind."""
    out = console()
    positives, negatives = report.total("false_positives"), report.total("false_negatives")
    failed, unmatched = report.total("failed"), report.total("unmatched")
    if not report.num_compared:
        verdict = styled("[bold yellow]Inconclusive:[/bold yellow] no sample has both rewards")
    elif not positives + negatives:
        verdict = styled("[bold green]They agree:[/bold green] on {:,} samples", report.num_compared)
    else:
        verdict = styled(
            "[bold red]They disagree:[/bold red] on {:,} of {:,} samples: {:,} are paid by the record alone "
            "(false positives), {:,} by {} alone (false negatives)",
            positives + negatives,
            report.num_compared,
            positives,
            negatives,
            report.function,
        )
    out.print(verdict)
    out.print(styled("[dim]paid is a reward above {}[/dim]", format_number(report.middle)))
    if failed:
        out.print(styled("[yellow]{:,} calls failed:[/yellow] {}", failed, report.failure))
    if unmatched:
        out.print(styled("[yellow]{:,} samples:[/yellow] no row of the data has their prompt", unmatched))
    if not report.disagreements:
        return
    out.print(table_of_steps(report))
    for kind in ("false positive", "false negative"):
        found = [item for item in report.disagreements if item.kind == kind]
        for item in found[:: max(1, len(found) // MOST_ROWS)][:MOST_ROWS]:
            out.print(
                styled(
                    "{}  recorded {}, now {}  {!r}\n  [dim]{}[/dim]",
                    item.kind,
                    format_number(item.recorded),
                    format_number(item.rescored),
                    printable(item.text[-LONGEST_EXAMPLE:]),
                    view_command(report.record, item.step, item.prompt, item.sample),
                )
            )


def table_of_steps(report: RescoreReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("step", "samples", "agree", "false positives", "false negatives", "failed"):
        table.add_column(heading, justify="right")
    wrong = [step for step in report.steps if step.false_positives + step.false_negatives]
    shown = sorted(wrong, key=lambda step: -(step.false_positives + step.false_negatives))[:MOST_STEPS]
    for step in sorted(shown, key=lambda step: step.step):
        counts = (step.step, step.rows, step.agree, step.false_positives, step.false_negatives, step.failed)
        table.add_row(*(f"{count:,}" for count in counts))
    if len(wrong) > len(shown):
        table.add_row(f"... {len(wrong) - len(shown)} more")
    return table
