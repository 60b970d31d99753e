"""`areal-debug config`: list the options of a run."""

import click

from areal_debug.cli import Verb, json_option
from areal_debug.render import console, errors_as_sentences, print_json

KINDS = ("grpo", "ppo", "sft", "rw", "dpo")


@click.command(
    cls=Verb, example="areal-debug config actor.optimizer\nareal-debug config temperature --kind grpo"
)
@click.argument("search", metavar="[SECTION|SEARCH]", required=False, default="")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="grpo",
    show_default=True,
    help="Method whose options to list.",
)
@json_option
@errors_as_sentences
def command(search: str, kind: str, as_json: bool) -> None:
    """List options with their type, default, limits and help.

    SECTION, as actor.optimizer, lists the options below it. SEARCH lists those with the words in
    their name or help. Without either, all are listed.
    """
    from dataclasses import asdict

    from areal_debug.config.options import KINDS as CLASSES
    from areal_debug.config.options import options_of, select
    from areal_debug.config.render import print_options

    found = select(list(options_of(CLASSES[kind])), search)
    if as_json:
        print_json({"kind": kind, "options": [asdict(option) for option in found]})
    else:
        print_options(console(), found)
