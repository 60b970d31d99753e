"""Export a record as a file of another tool."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recorder.errors import RecordError
from recorder.exporters import hugging_face, jsonl, logged, parquet, pt, slime
from recorder.reader import open_record

FORMATS: dict[str, Callable[..., list[Path]]] = {
    "jsonl": jsonl.write,
    "parquet": parquet.write,
    "pt": pt.write,
    "slime": slime.write,
    "hf": hugging_face.write,
    "lines": logged.write,  # what is logged to Weights & Biases or Trackio
}
TABLES = ("jsonl", "parquet", "hf")
TABLE_LACKS = ("plans, statistics, checksums and anchors",)
# Data that each format cannot represent.
LOST = {
    "jsonl": TABLE_LACKS,
    "parquet": TABLE_LACKS,
    "hf": TABLE_LACKS,
    "lines": (
        "plans, checksums and anchors",
        "values per token",
        "pictures",
        "messages and tools of agents (their numbers are carried)",
    ),
    "pt": (
        "plans, outcomes, anchors and text",
        "messages and tool calls of agents",
        "pictures",
        "what the trainer computed",
        "the rank of each row",
    ),
    "slime": (
        "plans, outcomes and anchors",
        "what the trainer computed",
        "pictures",
        "the weight version of each token, if a sample has several",
    ),
}


@dataclass(frozen=True)
class Exported:
    """The written files, what the format cannot represent, and the command that shows the files."""

    files: tuple[str, ...]
    steps: tuple[int, ...]
    lost: tuple[str, ...]
    next: str | None = None


def export_record(
    source: str | os.PathLike[str],
    format_name: str,
    destination: Path,
    step: int | None = None,
    overwrite: bool = False,
    images: str = "bytes",
) -> Exported:
    """Write the steps of a record, or one of them, in the format of another tool.

    Args:
        destination: a file; a format with one file per step needs `{step}` in the name if there are
            several. A folder for "hf", and for "parquet" unless the name ends in .parquet.
        images: in a table, "bytes" of pictures, or the paths of "files" in DESTINATION.images.

    Raises:
        RecordError: the record cannot be read, or the destination exists.
    """
    record = open_record(source)
    steps = record.steps if step is None else (step,)
    if not steps:
        raise RecordError(f"{record.path} has no finished step: there is nothing to export")
    if not destination.parent.is_dir():
        raise RecordError(f"{destination.parent} is not a folder: create it first")
    options = {}
    if format_name in TABLES and images == "files":
        options["pictures"] = destination.with_name(f"{destination.name}.images")
    files = FORMATS[format_name](record, destination, steps, overwrite, **options)
    return Exported(tuple(map(str, files)), tuple(steps), LOST[format_name])
