"""The samples of a record for exporters, ordered by step, rank and row; and names of files."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recorder.errors import RecordError, RecordExists
from recorder.exporters.sample_columns import Layout, layout_of, read_columns
from recorder.reader import Record

STEP_FIELD = "{step}"


def layout_of_steps(record: Record, steps: Sequence[int], pictures: Path | None = None) -> Layout:
    """Return the columns of some steps; pictures are bytes, or files in the folder `pictures`.

    Raises StepNotRecorded, DamagedRecord.
    """
    return replace(layout_of(record, map(record.step, steps)), pictures=pictures)


def read_rows(
    record: Record, steps: Sequence[int], layout: Layout, names: Collection[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the samples of some steps, all ranks: each column as JSON types, None if unknown.

    Raises StepNotRecorded, DamagedRecord.
    """
    for number in steps:
        step = record.step(number)
        for rank in range(step.manifest.num_ranks):
            columns = read_columns(step, rank, layout, names)
            for row in range(step.num_rows(rank)):
                yield {name: column.value(row) for name, column in columns.items()}


def check_file(file: Path, overwrite: bool) -> None:
    """Raise RecordExists unless the file may be written."""
    if file.exists() and not overwrite:
        raise RecordExists(f"{file} exists already: choose another name, or --force to replace it")


def check_folder(folder: Path, overwrite: bool, is_ours: Callable[[Path], bool]) -> None:
    """Raise RecordExists unless the folder may be written: absent, empty, or `is_ours`."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise RecordExists(f"{folder} exists already: choose another name, or --force to replace it")
    if not is_ours(folder):
        raise RecordExists(f"{folder} is no earlier export of this format: choose another name")


def file_of_step(template: Path, step: int, num_steps: int) -> Path:
    """Return the file of a step, for formats with one file per step.

    Raises RecordError if several steps would share a name.
    """
    if STEP_FIELD not in str(template) and num_steps > 1:
        raise RecordError(
            f"the format has one file a step and there are {num_steps}: put {STEP_FIELD} into the name, or choose one with --step"
        )
    return Path(str(template).replace(STEP_FIELD, str(step)))
