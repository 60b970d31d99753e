"""`areal-debug diff`: the older name of `areal-debug why A B --all`."""

import click

from areal_debug.cli import Verb, json_option, step_option
from areal_debug.render import errors_as_sentences, note
from areal_debug.verbs.why import compare_stages


@click.command(cls=Verb, hidden=True, example="areal-debug why runs/A runs/B --all")
@click.argument("left", metavar="A", type=click.Path())
@click.argument("right", metavar="B", type=click.Path())
@step_option("all steps, up to the first that differs")
@click.option("--all", "show_all", is_flag=True, help="List all differences in that step.")
@json_option
@errors_as_sentences
def command(left: str, right: str, step: int | None, show_all: bool, as_json: bool) -> None:
    """Find where records A and B diverge: the first step, stage, tensor, row and token, and the
    cause. Exit code 0: bit-identical. 1: they differ.
    """
    note(f"diff is `areal-debug why {left} {right} --all`")
    compare_stages(left=left, right=right, step=step, show_all=show_all, as_json=as_json)
