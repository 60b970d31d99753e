"""`areal-debug record archive` and `extract`: convert a record into one zarr store and back."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, force_option, json_option, skip_damaged_option
from areal_debug.confined import CPU_S, describes_limits
from areal_debug.render import (
    console,
    end_if_damaged,
    format_bytes,
    note,
    print_json,
    refuse_existing,
    styled,
    with_progress,
)
from areal_debug.report.model import Report
from areal_debug.report.terminal import print_answer

if TYPE_CHECKING:
    from recorder.archive.pack import Archived


@click.command(
    cls=Verb,
    short_help="Write a record into one compressed zarr store",
    example="areal-debug record archive runs/record --to s3://bucket/record",
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "destination",
    required=True,
    metavar="PLACE",
    help="Folder, file.zip, or fsspec URL.",
)
@click.option(
    "--without-anchors", is_flag=True, help="Leave checkpoints out: replays start from the run's model."
)
@skip_damaged_option
@force_option
@json_option
@describes_limits(CPU_S)
def archive(
    record: Path,
    destination: str,
    without_anchors: bool,
    skip_damaged: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write RECORD, after a check of every byte, into a zarr store: compressed, sharded,
    checksummed. Every verb reads it like the folder.
    """
    from recorder.archive.pack import archive_record

    progress = partial(with_progress, "archiving")
    archived = archive_record(record, destination, force, progress, not without_anchors, skip_damaged)
    if archived.num_continued and not as_json:
        note(f"continued: {archived.num_continued} shards were there from a call that was interrupted")
    print_answer(asdict(archived), report_of_archive(archived), as_json)
    end_if_damaged(archived.left_out, code=int(archived.is_damaged))


@click.command(
    cls=Verb,
    short_help="Write an archive's files into a folder",
    example="areal-debug record extract s3://bucket/record --to runs/record",
)
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--to", "destination", type=click.Path(path_type=Path), required=True, help="New folder.")
@force_option
@json_option
@describes_limits(CPU_S)
def extract(archive: Path, destination: Path, force: bool, as_json: bool) -> None:
    """Write the files of an archive into a folder, bit for bit as they were recorded."""
    from areal_debug.train.script_options import check_for_record
    from recorder.archive.extract import extract_record

    refuse_existing(destination, force)
    if force:
        check_for_record(destination, archive)
    extracted = extract_record(archive, destination, force, partial(with_progress, "extracting"))
    if as_json:
        print_json({"archive": str(archive), "record": str(destination), **asdict(extracted)})
        return
    if extracted.num_continued:
        note(f"continued: {extracted.num_continued} steps were there from an extraction that was interrupted")
    console().print(styled("{} steps in {}, as they were recorded", extracted.num_steps, destination))


def report_of_archive(archived: "Archived") -> Report:
    tokens = archived.num_tokens
    size, source = (
        format_bytes(size_bytes) + (f", {size_bytes / tokens:.3g} bytes per token" if tokens else "")
        for size_bytes in (archived.archive_bytes, archived.source_bytes)
    )
    verdict = f"{archived.num_steps} steps, {archived.num_tokens:,} tokens"
    return Report(verdict, f"{size}, in {archived.location}", "", notes=[f"the source has {source}"])
