"""`areal-debug diff`: where two records part, and why."""

import click

from areal_debug.render import errors_as_sentences, print_json, with_progress


@click.command()
@click.argument("left", metavar="A", type=click.Path())
@click.argument("right", metavar="B", type=click.Path())
@click.option("--step", type=int, help="Compare this step only; otherwise all, up to the first that differs.")
@click.option("--all", "show_all", is_flag=True, help="List everything that differs in that step.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def command(left: str, right: str, step: int | None, show_all: bool, as_json: bool) -> None:
    """Say where two records part: which step, stage, tensor, row and token first, and for what reason.

    B may be another run, or a replay of A (`areal-debug replay A --record-to B`). Exit code 0: the same in every bit. 1: they differ.
    """
    from areal_debug.diff_output import print_diff
    from recorder import open_record
    from replayer.diff import diff_records

    here, there = open_record(left), open_record(right)
    total = len(set(here.steps) & set(there.steps)) if step is None else 1
    report = with_progress("comparing steps", total, lambda tick: diff_records(here, there, step, tick))
    if as_json:
        print_json(report.to_dict())
    else:
        print_diff(here, there, report, show_all)
    raise SystemExit(0 if report.same else 1)
