"""`areal-debug bisect-step`: the older name of `areal-debug why A B --layers`."""

from pathlib import Path

import click

from areal_debug.cli import Verb, json_option, model_option
from areal_debug.render import errors_as_sentences, note
from areal_debug.verbs.why import compare_layers


@click.command(cls=Verb, hidden=True, example="areal-debug why runs/A runs/B --layers")
@click.argument("left", metavar="A", type=click.Path())
@click.argument("right", metavar="B", type=click.Path())
@click.option(
    "--layers", is_flag=True, help="Replay that step of both and find the first layer that differs."
)
@click.option(
    "--repository", type=click.Path(path_type=Path), help="Has the commits of both runs; by default this one."
)
@model_option
@json_option
@errors_as_sentences
def command(
    left: str, right: str, layers: bool, repository: Path | None, model: str | None, as_json: bool
) -> None:
    """Find the first step after which the weights of records A and B differ, by their checksums.

    Exit code 0: the weights never differ. 1: they do.
    """
    note(f"bisect-step is `areal-debug why {left} {right} --layers`")
    compare_layers(left, right, layers, repository or Path(__file__).parents[2], model, as_json)
