"""`areal-debug crosscheck`: recompute a recorded step by a float64 twin, TRL's and verl's code."""

from typing import Any

import click

from areal_debug.cli import Verb, json_option, step_option, step_range_option
from areal_debug.each import report_each_step
from areal_debug.render import announce, errors_as_sentences, print_json

EXIT_CODES = {"equal": 0, "differs": 1, "not checked": 2}


@click.command(
    cls=Verb,
    example="areal-debug crosscheck runs/record\nareal-debug crosscheck runs/record --with trl,verl,float64 --json\n"
    "areal-debug crosscheck runs/record --steps 0:100",
)
@click.argument("record", type=click.Path())
@click.option(
    "--with",
    "opinions",
    default="float64",
    show_default=True,
    metavar="NAME,...",
    help="Who recomputes: float64 (this package), trl, verl (their own code, if installed).",
)
@step_option("the first")
@step_range_option
@click.option("--model", type=click.Path(), help="Folder of the weights that the step starts from.")
@json_option
@errors_as_sentences
def command(
    record: str,
    opinions: str,
    step: int | None,
    step_range: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Recompute the rewards, advantages, loss and gradient norm of a step of RECORD, and name the
    first stage, option and rows that differ.

    Exit code 0: equal within the rounding of float32. 1: they differ. 2: nothing could be checked.
    """
    if step_range is not None:
        report_each_step(record, step_range, columns, as_json)
    announce(f"recomputing {'the first step' if step is None else f'step {step}'} of {record}")
    from areal_debug.crosscheck.render import print_crosscheck
    from replayer.crosscheck.step_check import crosscheck, parse_opinions  # imports torch
    from replayer.crosscheck.step_rows import read_confined

    names = parse_opinions(opinions)
    report = crosscheck(read_confined(record, step), names, model)
    if as_json:
        print_json(report.to_dict())
    else:
        print_crosscheck(report)
    raise SystemExit(EXIT_CODES[report.verdict])


def columns(report: dict[str, Any]) -> dict[str, str]:
    """Return what the table of several steps has of a step's report."""
    return {"stage": report["first_stage"] or "-", "option": report["option"] or "-"}
