"""Print the reports of `diff` and `bisect-step`: verdict, first difference, stages, next steps."""

from typing import TYPE_CHECKING

from rich.text import Text

from areal_debug.diff.excerpts import read_excerpts
from areal_debug.render import console, difference_table, format_number, format_value, styled
from areal_debug.report.links import view_command

if TYPE_CHECKING:
    from recorder import Record
    from replayer.commits.bisect import BisectReport
    from replayer.commits.first_step import FirstStep
    from replayer.commits.layers import LayersReport
    from replayer.compare.stages import StageDifference
    from replayer.diff import DiffReport, Excerpt

SHOWN_OF_A_STAGE, SHOWN_CHANGES = 3, 5
REFUTED_BY = {
    "configuration": "set these options equal and run B again: if it still differs, they were not the cause",
    "input": "replay A with B's options: if that differs from A, the input is not the only cause",
    "environment": "run B again where these are equal: if it still differs, they were not the cause",
    "kernel noise": "areal-debug check run on this machine: if two runs of one step are bit-identical, it is not noise",
    "unknown": "a replay of both records on one machine that reproduces neither",
}


def print_diff(left: "Record", right: "Record", report: "DiffReport", show_all: bool) -> None:
    out = console()
    print_verdict(left, right, report)
    if report.first is not None:
        print_stages(report, show_all)
    for title, items in (
        ("Set differently in the config", report.set_differently.config),
        ("Different environment", report.set_differently.environment),
        ("Different model files", report.set_differently.model),
    ):
        if items:
            out.print()
            out.print(difference_table(title, items, headings=("what", "A", "B")))
    print_not_compared(left, right, report)
    if report.verdict is not None:
        out.print(styled("\n[dim]would refute it: {}[/dim]", REFUTED_BY[report.verdict.cause]))


def print_verdict(left: "Record", right: "Record", report: "DiffReport") -> None:
    """Print whether the records are the same; if not, the first difference and its cause."""
    out = console()
    if report.first is None or report.verdict is None:
        count = f"{report.num_compared} step{'s' * (report.num_compared != 1)}"
        what = "all that is known of both is" if report.not_known else "all"
        out.print(styled("[bold green]Same:[/bold green] {} compared, {} bit-identical.", count, what))
        return
    out.print(
        styled(
            "[bold red]Different:[/bold red] the records diverge first in step {}, stage {}. [dim]{} of {} common steps compared[/dim]",
            report.step,
            report.first.stage,
            report.num_compared,
            report.num_shared,
        )
    )
    if report.unrelated is not None:
        out.print(styled("[bold yellow]unrelated runs[/bold yellow]: {}", report.unrelated))
    out.print(styled("[bold]{}[/bold]: {}", report.verdict.cause, report.verdict.why))
    out.print(styled("first        {}", describe(report.first)))
    if report.step is not None and (place := report.first.place) is not None:
        at = (report.step, place.prompt_id, place.sample_id, place.token)
        out.print(styled("look         {}", view_command(left.path, *at, compare=right.path)))
    print_context(left, right, report)


def describe(difference: "StageDifference", sides: tuple[str, str] = ("in A", "in B")) -> str:
    """Describe one difference: name, location, both values, and how many elements differ."""
    words = [difference.name]
    if difference.minibatch is not None:
        words.append(f"minibatch {difference.minibatch}")
    if (place := difference.place) is not None:
        words.append(
            f"rank {place.rank}, row {place.row} (prompt {place.prompt_id}, sample {place.sample_id})"
        )
        if place.token is not None:
            words.append(f"token {place.token}")
    values = f"{show(difference.left)} {sides[0]}, {show(difference.right)} {sides[1]}"
    text = f"{', '.join(words)}: {values}"
    if difference.num_compared > 1:
        text += f"; {difference.num_different:,} of {difference.num_compared:,} differ"
    if difference.largest is not None:
        text += f", by at most {format_number(difference.largest)}" if difference.num_compared > 1 else ""
    return text


def show(value: object) -> str:
    """Format a value of a record; None is "absent"."""
    if value is None:
        return "absent"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def print_context(left: "Record", right: "Record", report: "DiffReport") -> None:
    assert report.first is not None
    assert report.step is not None
    sides = read_excerpts(left, right, report.step, report.first) or ()
    for name, excerpt in zip("AB", sides, strict=False):
        console().print(Text(f"text in {name}    ", style="dim") + marked(excerpt))


def marked(excerpt: "Excerpt") -> Text:
    """Return a text with its token between brackets."""
    before, token, after = (repr(part)[1:-1] for part in (excerpt.before, excerpt.token, excerpt.after))
    return Text.assemble((before, "dim"), "[", (token, "bold"), "]", (after, "dim"))


def print_stages(report: "DiffReport", show_all: bool) -> None:
    from replayer.compare.stages import STAGES

    out = console()
    out.print()
    for stage in STAGES:
        found = [difference for difference in report.differences if difference.stage == stage]
        if not found:
            word = "not recorded" if stage in report.not_compared else styled("[green]same[/green]")
            out.print(styled("  {:<11}{}", stage, word))
            continue
        shown = found if show_all else found[:SHOWN_OF_A_STAGE]
        for number, difference in enumerate(shown):
            out.print(
                styled("  {:<11}[red]differs[/red]  {}", stage if number == 0 else "", describe(difference))
            )
        if len(found) > len(shown):
            out.print(styled("  {:<11}... and {} more: --all lists them", "", len(found) - len(shown)))


def print_not_compared(left: "Record", right: "Record", report: "DiffReport") -> None:
    out = console()
    if report.not_known:
        out.print(styled("[dim]not known, so not compared: {}[/dim]", "; ".join(report.not_known)))
    if report.not_compared:
        stages = ", ".join(report.not_compared)
        hint = (
            ""
            if left.header.trainer or right.header.trainer
            else "; debug.dump_scope=full records all stages"
        )
        out.print(styled("[dim]not recorded on both sides: {}{}[/dim]", stages, hint))
    for name, steps in (("A", report.only_left), ("B", report.only_right)):
        if steps:
            out.print(
                styled(
                    "[dim]{} steps from {} to {} are only in {}[/dim]", len(steps), steps[0], steps[-1], name
                )
            )


def print_first_step(found: "FirstStep") -> None:
    """Print the step after which the weights diverge, and how few steps were read to find it."""
    out = console()
    read = styled("[dim]{} of {:,} steps read, no step was replayed[/dim]", found.num_read, found.num_steps)
    if found.step is None:
        out.print(
            styled(
                "[bold green]The weights never differ[/bold green] up to step {}. {}", found.last_same, read
            )
        )
    else:
        before = (
            "it is the first step that both records have"
            if found.last_same is None
            else f"they were the same after step {found.last_same}"
        )
        out.print(
            styled("[bold red]The weights differ after step {}[/bold red]; {}. {}", found.step, before, read)
        )


def print_layers(report: "LayersReport") -> None:
    """Print the first layer that differs when the step is replayed."""
    out = console()
    for side in report.with_current_code:
        out.print(
            styled("[yellow]{} ran with the current code: its own commit cannot be used here[/yellow]", side)
        )
    if report.name is None:
        out.print(
            styled(
                "[bold]layers[/bold]       all {} layer calls agree when step {} is replayed here from "
                "both records: the cause is not in the model (hardware, kernels, other code)",
                report.num_calls,
                report.step,
            )
        )
        return
    why = "its input differs already" if report.input_differs else "its input is the same"
    out.print(
        styled(
            "[bold]layers[/bold]       the first call that differs is {} (call {:,} of {:,}, rank {}); {}",
            report.name,
            report.index,
            report.num_calls,
            report.rank,
            why,
        )
    )
    if report.file is not None:
        out.print(styled("             {}, {}:{}", report.kind, report.file, report.line))


def print_culprit(report: "BisectReport") -> None:
    out, found = console(), report.culprits[-1]
    if len(report.culprits) == 1:
        out.print(styled("[bold red]{}[/bold red] changed the numbers: {}", found.hash[:10], found.subject))
        out.print(styled("{}, {}", found.author, found.date))
    else:
        out.print(
            styled(
                "[bold red]One of {} commits[/bold red] changed the numbers; those before the last",
                len(report.culprits),
            )
        )
        out.print("could not be replayed:")
        for commit in report.culprits:
            out.print(styled("  {}  {}", commit.hash[:10], commit.subject))
    out.print(
        styled(
            "\nFirst in step {}, {} values (good, then bad; 'recorded' as in the record):",
            report.step,
            len(report.changes),
        )
    )
    for change in report.changes[:SHOWN_CHANGES]:
        good, bad = (
            "recorded" if value is None else format_value(value) for value in (change.good, change.bad)
        )
        out.print(styled("  {}: {}, {}", change.where, good, bad))
    out.print()
    for line in report.files.splitlines():
        out.print(styled("{}", line))
    out.print(
        styled(
            "[dim]{} replays for {} commits. Next: git show {}[/dim]",
            report.num_replays,
            report.num_commits,
            found.hash[:10],
        )
    )
