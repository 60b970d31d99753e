"""Parquet: one sample per row, a list per token column, and a checksum per page.

    FILE.parquet                   all steps in one file
    FOLDER/step=12/part-0.parquet  a file per step: a table for DuckDB, Polars and Ray Data

Row groups are small, so that a viewer can read a single sample.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from areal_core.safety.durable import replacing
from areal_core.safety.scratch import unfinished_folder
from recorder.exporters.arrow import batches, schema_of
from recorder.exporters.rows import check_file, check_folder, layout_of_steps
from recorder.exporters.sample_columns import Layout
from recorder.reader import Record

if TYPE_CHECKING:
    import pyarrow

ROW_GROUP = 64
PARTITION, FILE_NAME = "step=", "part-0.parquet"


def write(
    record: Record, place: Path, steps: Sequence[int], overwrite: bool, pictures: Path | None = None
) -> list[Path]:
    """Write one file with all steps, or a folder with a file per step, atomically."""
    is_file = place.suffix == ".parquet" or (place.exists() and not place.is_dir())
    if is_file:
        check_file(place, overwrite)
    else:
        check_folder(place, overwrite, is_table)
    layout = layout_of_steps(record, steps, pictures)
    if is_file:
        with replacing(place) as file:
            write_batches(file, layout, batches(record, steps, layout))
        return [place]
    # the folder's name is the column; with leading zeros DuckDB would take it for text
    names = [f"{PARTITION}{step}/{FILE_NAME}" for step in steps]
    others = replace(layout, fields=tuple(f for f in layout.fields if f.name != "step"))
    with unfinished_folder(place) as content:
        for step, name in zip(steps, names, strict=True):
            (content / name).parent.mkdir(parents=True)
            with (content / name).open("wb") as file:
                write_batches(file, others, batches(record, [step], others))
                file.flush()
                os.fsync(file.fileno())
    return [place / name for name in names]


def write_batches(file: IO[bytes], layout: Layout, found: Iterable["pyarrow.RecordBatch"]) -> None:
    from pyarrow import parquet

    schema = schema_of(layout.fields)
    with parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as out:
        for batch in found:
            out.write_batch(batch, row_group_size=ROW_GROUP)


def is_table(folder: Path) -> bool:
    return folder.is_dir() and all(
        path.name.startswith(PARTITION) and path.is_dir() and os.listdir(path) == [FILE_NAME]
        for path in folder.iterdir()
    )
