"""`areal-debug record export`: write the steps of a record in the format of another tool."""

from dataclasses import asdict
from pathlib import Path

import click

from areal_debug.cli import Verb, force_option, json_option, step_option
from areal_debug.render import console, errors_as_sentences, escaped, print_json

FORMATS = ("jsonl", "pt", "parquet", "slime")


@click.command(
    cls=Verb,
    short_help="Write a record as JSON lines, torch tensors, Parquet or slime's rollout data",
    example="areal-debug record export runs/record --format jsonl --to samples.jsonl",
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--format", "format_name", type=click.Choice(FORMATS), required=True, help="Format of the files."
)
@click.option(
    "--to",
    "destination",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write; pt and slime have one per step: put {step} into its name.",
)
@step_option("all steps")
@force_option
@json_option
@errors_as_sentences
def export(
    record: Path, format_name: str, destination: Path, step: int | None, force: bool, as_json: bool
) -> None:
    """Write the samples of RECORD as JSON lines, torch tensors, Parquet or slime's rollout data."""
    from recorder.exporters.exporting import export_record

    exported = export_record(record, format_name, destination, step, force)
    if as_json:
        print_json(asdict(exported))
        return
    out = console()
    out.print(f"{len(exported.steps)} steps in {exported.files[0]}" + and_more(len(exported.files) - 1))
    out.print(escaped(f"not carried by {format_name}: {'; '.join(exported.lost)}"), style="dim")


def and_more(count: int) -> str:
    """Return " and 3 more files", or nothing."""
    return f" and {count} more files" if count else ""
