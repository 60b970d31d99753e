"""`areal-debug bisect-step`: find the first step after which two records' weights differ."""

from dataclasses import asdict

import click

from areal_debug.cli import Verb, json_option, model_option
from areal_debug.render import console, errors_as_sentences, print_json, styled


@click.command(cls=Verb, example="areal-debug bisect-step runs/A runs/B --layers")
@click.argument("left", metavar="A", type=click.Path())
@click.argument("right", metavar="B", type=click.Path())
@click.option(
    "--layers", is_flag=True, help="Replay that step of both and find the first layer that differs."
)
@model_option
@json_option
@errors_as_sentences
def command(left: str, right: str, layers: bool, model: str | None, as_json: bool) -> None:
    """Find the first step after which the weights of records A and B differ, by their checksums.

    Exit code 0: the weights never differ. 1: they do.
    """
    from areal_debug.diff.render import print_first_step, print_layers, print_verdict
    from recorder import open_record
    from replayer.commits.first_step import bisect_steps, explain_step

    here, there = open_record(left), open_record(right)
    found = bisect_steps(here, there)
    report = explain_step(here, there, found)
    traced = None
    if layers and found.step is not None:
        from areal_debug.diff.layers import trace_both

        traced = trace_both(here, there, found.step, model)
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
