"""`areal-debug bisect`: find the commit of the trainer's code that changed the numbers."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from areal_debug.cli import Verb, json_option, model_option
from areal_debug.render import announce, console, errors_as_sentences, format_value, note, print_json, styled

if TYPE_CHECKING:
    from replayer.commits.bisect import BisectReport

DEFAULT_STEPS = 5
SHOWN = 5


@click.command(cls=Verb, example="areal-debug bisect runs/record --good v1 --bad HEAD")
@click.argument("record", type=click.Path())
@click.option("--good", required=True, metavar="REV", help="Revision with the right numbers.")
@click.option("--bad", default="HEAD", show_default=True, metavar="REV", help="Revision with other numbers.")
@click.option(
    "--repository", type=click.Path(path_type=Path), help="Checkout of the code; by default this one."
)
@click.option("--from-step", type=int, help="First step to compare; by default the record's first.")
@click.option(
    "--to-step", type=int, help=f"Last step to compare; by default the record's first {DEFAULT_STEPS}."
)
@model_option
@json_option
@errors_as_sentences
def command(
    record: str,
    good: str,
    bad: str,
    repository: Path | None,
    from_step: int | None,
    to_step: int | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Find the commit between two revisions that changed the numbers of RECORD.

    Replays RECORD with the code of commits, checked out in a private folder: about log2(number of
    commits) replays. Your repository is not touched. Exit code 1: a commit was found.
    """
    from areal_debug.verbs.replay import refuse_damage
    from recorder import open_record
    from replayer.commits.warm import search_commits
    from replayer.preconditions import check_model, check_recorded_results, check_steps_present, step_range
    from replayer.request import Request

    opened = open_record(record)
    check_recorded_results(opened, "bisect")
    first, last = step_range(opened, from_step, to_step)
    if to_step is None:
        last = min(last, first + DEFAULT_STEPS - 1)
    check_steps_present(opened, first, last)
    check_model(opened, model or opened.header.config["actor"]["path"], first)
    announce(f"searching {good}..{bad} for the commit that changed the numbers of {record}")
    refuse_damage(record, len(opened.steps))
    request = Request(record, first, last, model)
    code = repository or Path(__file__).parents[2]
    report = search_commits(request, code, good, bad, opened.header.world_size, note)
    if as_json:
        print_json(report.to_dict())
    else:
        print_culprit(console(), report)
    raise SystemExit(1)


def print_culprit(out: Console, report: "BisectReport") -> None:
    found = report.culprits[-1]
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
    for change in report.changes[:SHOWN]:
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
