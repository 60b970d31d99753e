"""From a record to a file of another tool."""

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
# What each format has no place for.
LOST = {
    "jsonl": ("plans, outcomes and anchors",),
    "pt": ("plans, outcomes, anchors and text", "which rank trained on a row"),
    "parquet": ("plans, outcomes and anchors",),
    "slime": (
        "plans, outcomes and anchors",
        "which version sampled a token, where one sample has several",
        "tokens before the first trained one count as prompt",
    ),
}


@dataclass(frozen=True)
class Exported:
    """The files that were written, and what they do not hold."""

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
    """Writes the steps of a record, or one of them, as a format of another tool.

    Args:
        destination: a file; formats with one file a step want `{step}` in its name when there are several.

    Raises:
        RecordError: the record cannot be read, or the destination is there.
    """
    record = open_record(source)
    steps = record.steps if step is None else (step,)
    if not steps:
        raise RecordError(f"{record.path} holds no finished step: there is nothing to export")
    if not destination.parent.is_dir():
        raise RecordError(f"{destination.parent} is no folder: make it first")
    files = FORMATS[format_name](record, destination, steps, overwrite)
    return Exported(tuple(map(str, files)), tuple(steps), LOST[format_name])
