"""`areal-debug bisect`: the older name of `areal-debug why RECORD --commits GOOD..BAD`."""

from pathlib import Path

import click

from areal_debug.cli import Verb, json_option, model_option
from areal_debug.render import errors_as_sentences, note
from areal_debug.verbs.why import DEFAULT_STEPS, search


@click.command(cls=Verb, hidden=True, example="areal-debug why runs/record --commits v1..HEAD")
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
    """Find the commit between two revisions that changed the numbers of RECORD. Exit code 1: a
    commit was found.
    """
    note(f"bisect is `areal-debug why {record} --commits {good}..{bad}`")
    code = repository or Path(__file__).parents[2]
    search(record, good, bad, code, from_step, to_step, model, as_json)
