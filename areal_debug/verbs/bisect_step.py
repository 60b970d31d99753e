"""`areal-debug bisect-step`: find the first step after which two records' weights differ."""

from dataclasses import asdict
from pathlib import Path

import click

from areal_debug.cli import Verb, json_option, model_option
from areal_debug.render import announce, console, errors_as_sentences, print_json, styled


@click.command(cls=Verb, example="areal-debug bisect-step runs/A runs/B --layers")
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

    With --layers, each side runs with the code of its own commit. Exit code 0: the weights never
    differ. 1: they do.
    """
    from areal_debug.diff.render import print_first_step, print_layers, print_verdict
    from recorder import open_record
    from replayer.commits.first_step import bisect_steps, explain_step

    here, there = open_record(left), open_record(right)
    announce(f"comparing the weights of {left} and {right}")
    found = bisect_steps(here, there)
    report = explain_step(here, there, found)
    traced = None
    if layers and found.step is not None:
        from replayer.commits.own_code import layers_with_own_code

        announce(f"replaying step {found.step} of both, each with its own code")
        code = repository or Path(__file__).parents[2]
        traced = layers_with_own_code(here, there, found.step, model, code)
    if as_json:
        facts = asdict(found) | {"diff": report and report.to_dict(), "layers": traced and asdict(traced)}
        print_json(facts)
    else:
        print_first_step(found)
        if report is not None:
            print_verdict(here, there, report)
            console().print(
                styled("[dim]all stages: areal-debug diff {} {} --step {}[/dim]", left, right, found.step)
            )
        if traced is not None:
            print_layers(traced)
    raise SystemExit(0 if found.step is None else 1)
