"""`areal-debug record archive` and `extract`: a record into one zarr store, and back to its files."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.render import console, errors_as_sentences, format_bytes, print_json, with_progress

if TYPE_CHECKING:
    from recorder.archive_writer import Archived


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--to", "destination", required=True, help="A folder, a file.zip, or any fsspec URL.")
@click.option("--force", is_flag=True, help="Replace an archive that is there.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def archive(record: Path, destination: str, force: bool, as_json: bool) -> None:
    """Write RECORD into a zarr store: compressed, sharded, checksummed; every verb reads it like the folder."""
    from recorder import open_record
    from recorder.archive_writer import archive_record

    num_steps = len(open_record(record).steps)
    archived = with_progress(
        "archiving", num_steps, lambda tick: archive_record(record, destination, force, tick)
    )
    if as_json:
        print_json(asdict(archived))
    else:
        print_archived(archived)


@click.command()
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--to", "destination", type=click.Path(path_type=Path), required=True, help="A new folder.")
@errors_as_sentences
def extract(archive: Path, destination: Path) -> None:
    """Write the files of an archive into a folder, bit for bit as they were recorded."""
    from recorder import open_record
    from recorder.extract import extract_record

    num_steps = len(open_record(archive).steps)
    with_progress("extracting", num_steps, lambda tick: extract_record(archive, destination, tick))
    console().print(f"{num_steps} steps in {destination}, as they were recorded")


def print_archived(archived: "Archived") -> None:
    """Where it is and what it takes, beside what the source takes."""
    tokens = max(1, archived.num_tokens)
    out = console()
    out.print(
        f"{archived.num_steps} steps, {archived.num_tokens:,} tokens: {format_bytes(archived.archive_bytes)}, "
        f"{archived.archive_bytes / tokens:.3g} bytes a token, in {archived.location}"
    )
    out.print(
        f"the source has {format_bytes(archived.source_bytes)}, {archived.source_bytes / tokens:.3g} bytes a token",
        style="dim",
    )
