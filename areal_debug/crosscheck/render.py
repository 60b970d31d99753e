"""Print the report of `crosscheck`: verdict, first difference, every stage of every opinion."""

from typing import TYPE_CHECKING

from rich.text import Text

from areal_debug.render import console, styled

if TYPE_CHECKING:
    from replayer.crosscheck.opinions import Crosscheck, RowDifference, StageOpinion

SHOWN_ROWS = 5
COLOURS = {"equal": "green", "differs": "red", "not checked": "dim"}


def print_crosscheck(report: "Crosscheck") -> None:
    out = console()
    print_verdict(report)
    for opinion in report.opinions:
        out.print(styled("\n[bold]{}[/bold]", opinion.name))
        for stage in opinion.stages:
            out.print(stage_line(stage))
            if stage.verdict == "differs" and stage.recorded is not None:
                out.print(
                    styled(
                        "{:13}{:.9g} in the record, {:.9g} recomputed; rounding allows {:.2g}",
                        "", stage.recorded, stage.recomputed, stage.allowed,
                    )
                )  # fmt: skip
    for note in report.notes:
        out.print(styled("\n[dim]note: {}[/dim]", note))
    if report.verdict == "differs":
        out.print(
            styled(
                "\n[dim]would refute it: the step trained again with the options set equal, "
                "if that record still differs[/dim]"
            )
        )


def print_verdict(report: "Crosscheck") -> None:
    """Print what differs first, and in which rows."""
    out = console()
    if report.first is None:
        if report.verdict == "equal":
            out.print(
                styled(
                    "[bold green]Equal:[/bold green] step {}, within the rounding of float32.", report.step
                )
            )
        else:
            out.print(
                styled("[bold]Not checked:[/bold] nothing of step {} could be recomputed.", report.step)
            )
        return
    opinion, stage = report.first
    out.print(
        styled(
            "[bold red]Different:[/bold red] step {}, stage {}, as recomputed by {}.",
            report.step, stage.stage, opinion.name,
        )
    )  # fmt: skip
    out.print(styled("[bold]option[/bold]   {}", stage.option))
    for row in stage.rows[:SHOWN_ROWS]:
        out.print(row_line(row))
    if stage.num_rows > SHOWN_ROWS:
        out.print(styled("         [dim]{} rows in total[/dim]", stage.num_rows))


def row_line(row: "RowDifference") -> Text:
    place = styled(
        "[bold]row[/bold]      rank {}, row {} (prompt {}, sample {})",
        row.rank,
        row.row,
        row.prompt_id,
        row.sample_id,
    )
    if row.token is not None:
        place.append(f", token {row.token}")
    if row.recorded is not None:
        place.append(f": {row.recorded:.9g} in the record, {row.recomputed:.9g} recomputed")
    return place


def stage_line(stage: "StageOpinion") -> Text:
    line = Text.assemble(f"  {stage.stage:<11}", (f"{stage.verdict:<12}", COLOURS[stage.verdict]))
    facts = [stage.what, stage.option, stage.reason]
    return line.append_text(styled("{}", ": ".join(fact for fact in facts if fact is not None)))
