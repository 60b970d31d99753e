"""`areal-debug diff`: find where two records diverge, and why."""

import click

from areal_debug.cli import Verb, json_option, step_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import errors_as_sentences, print_json, with_progress


@click.command(cls=Verb, example="areal-debug diff runs/A runs/B")
@click.argument("left", metavar="A", type=click.Path())
@click.argument("right", metavar="B", type=click.Path())
@step_option("all steps, up to the first that differs")
@click.option("--all", "show_all", is_flag=True, help="List all differences in that step.")
@json_option
@reads_untrusted("left", "right", reads=ANYWHERE)
@errors_as_sentences
def command(left: str, right: str, step: int | None, show_all: bool, as_json: bool) -> None:
    """Find where records A and B diverge: the first step, stage, tensor, row and token, and the
    cause.

    B may be another run, or a replay of A (`areal-debug replay A -o B`). Exit code 0:
    bit-identical. 1: they differ.
    """
    from areal_debug.diff.render import print_diff
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
