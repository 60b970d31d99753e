"""Export a record as a file of another tool."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recorder.errors import RecordError
from recorder.exporters import jsonl, parquet, pt, slime
from recorder.reader import Record, open_record

FORMATS: dict[str, Callable[[Record, Path, Sequence[int], bool], list[Path]]] = {
    "jsonl": jsonl.write,
    "pt": pt.write,
    "parquet": parquet.write,
    "slime": slime.write,
}
# Data that each format cannot represent.
LOST = {
    "jsonl": ("plans, outcomes and anchors",),
    "pt": ("plans, outcomes, anchors and text", "the rank of each row"),
    "parquet": ("plans, outcomes and anchors",),
    "slime": (
        "plans, outcomes and anchors",
        "the weight version of each token, if a sample has several",
        "tokens before the first one in the loss mask count as prompt",
    ),
}


@dataclass(frozen=True)
class Exported:
    """The written files, and what the format cannot represent."""

    files: tuple[str, ...]
    steps: tuple[int, ...]
    lost: tuple[str, ...]


def export_record(
    source: str | os.PathLike[str],
    format_name: str,
    destination: Path,
    step: int | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the steps of a record, or one of them, in the format of another tool.

    Args:
        destination: a file; a format with one file per step needs `{step}` in the name if there are
            several.

    Raises:
        RecordError: the record cannot be read, or the destination exists.
    """
    record = open_record(source)
    steps = record.steps if step is None else (step,)
    if not steps:
        raise RecordError(f"{record.path} has no finished step: there is nothing to export")
    if not destination.parent.is_dir():
        raise RecordError(f"{destination.parent} is not a folder: create it first")
    files = FORMATS[format_name](record, destination, steps, overwrite)
    return Exported(tuple(map(str, files)), tuple(steps), LOST[format_name])
