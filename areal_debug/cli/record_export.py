"""`areal-debug record export`: the steps of a record as a format of another tool."""

from dataclasses import asdict
from pathlib import Path

import click

from areal_debug.render import console, errors_as_sentences, escaped, print_json

FORMATS = ("jsonl", "pt", "parquet", "slime")


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--format", "format_name", type=click.Choice(FORMATS), required=True)
@click.option(
    "--to",
    "destination",
    type=click.Path(path_type=Path),
    required=True,
    help="A file; pt and slime have one a step: put {step} into its name.",
)
@click.option("--step", type=int, help="Only this step.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
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
    """` and 3 more files`, or nothing."""
    return f" and {count} more files" if count else ""
