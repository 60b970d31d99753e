"""Samples as Arrow: record batches, a table, a data frame. What is unknown is null."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from recorder.errors import RecordError
from recorder.reader import Record, RecordedStep
from recorder.tables.columns import (
    MESSAGE,
    MICRO_BATCH,
    NAMES,
    PICTURE,
    Column,
    Field,
    Layout,
    layout_of,
    read_columns,
)

if TYPE_CHECKING:
    import pandas
    import pyarrow

IMAGES_FEATURE = {"feature": {"_type": "Image"}, "_type": "List"}
MOST_VALUES = 2**31 - 1  # in the lists of one array


def type_of(field: Field) -> "pyarrow.DataType":
    """Return the Arrow type of a column."""
    import pyarrow

    if field.dtype is None or field.dtype.kind == "U":
        return pyarrow.string()
    if field.dtype == MICRO_BATCH:
        members = [(name, pyarrow.from_numpy_dtype(MICRO_BATCH[name])) for name in MICRO_BATCH.names or ()]
        return pyarrow.list_(pyarrow.struct(members))
    if field.dtype == NAMES:
        return pyarrow.list_(pyarrow.string())
    if field.dtype == MESSAGE:
        return pyarrow.list_(pyarrow.struct(message_members()))
    if field.dtype == PICTURE:
        return pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    inner = pyarrow.from_numpy_dtype(field.dtype)
    for _ in range(field.depth + field.is_list):
        inner = pyarrow.list_(inner)
    return inner


def message_members() -> list[tuple[str, "pyarrow.DataType"]]:
    import pyarrow

    text = pyarrow.string()
    asked = pyarrow.struct(
        [("type", text), ("function", pyarrow.struct([("name", text), ("arguments", text)]))]
    )
    types = {"tool_calls": pyarrow.list_(asked)}
    return [(name, types.get(name, text)) for name in MESSAGE.names or ()]


def schema_of(fields: Iterable[Field]) -> "pyarrow.Schema":
    """Return the schema of columns; pictures are those of `datasets` to it."""
    import pyarrow

    columns = [(field.name, type_of(field)) for field in fields]
    features = {name: IMAGES_FEATURE for name, _ in columns if name == "images"}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    return pyarrow.schema(columns, metadata)


def array_of(field: Field, column: Column) -> "pyarrow.Array":
    """Return a column's values as an Arrow array of `type_of(field)`."""
    if column.offsets is None:
        return flat_array(field, column.values, column.known)
    values = flat_array(field, column.values, column.known_values)
    return list_array(column.offsets, values, column.known)


def flat_array(field: Field, values: Any, known: np.ndarray | None) -> "pyarrow.Array":
    import pyarrow

    if field.dtype is None or field.dtype.kind == "U":
        return pyarrow.array(values, pyarrow.string(), mask=None if known is None else ~known)
    if field.dtype == MICRO_BATCH:
        names = MICRO_BATCH.names or ()
        return pyarrow.StructArray.from_arrays([number_array(values[name]) for name in names], list(names))
    if field.dtype == NAMES:
        return pyarrow.array(values.tolist(), pyarrow.string())
    if field.dtype == MESSAGE:
        members = message_members()
        arrays = [pyarrow.array(values[name].tolist(), kind) for name, kind in members]
        return pyarrow.StructArray.from_arrays(arrays, [name for name, _ in members])
    if field.dtype == PICTURE:
        columns = [
            pyarrow.array(values["bytes"].tolist(), pyarrow.binary()),
            pyarrow.array(values["path"].tolist(), pyarrow.string()),
        ]
        return pyarrow.StructArray.from_arrays(columns, list(PICTURE.names or ()))
    values = values.astype(field.dtype, copy=False)
    if values.ndim == 1:
        return number_array(values, known)
    array = number_array(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        count, width = math.prod(values.shape[:axis]), values.shape[axis]
        array = list_array(np.arange(count + 1) * width, array, known if axis == 1 else None)
    return array


def number_array(values: np.ndarray, known: np.ndarray | None = None) -> "pyarrow.Array":
    """Return [n] numbers without a copy; `pyarrow.array` would import pandas first, for 0.5 s."""
    import pyarrow

    data = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, len(values), [bitmap(known), pyarrow.py_buffer(data)])


def list_array(offsets: np.ndarray, values: "pyarrow.Array", known: np.ndarray | None) -> "pyarrow.Array":
    """Return lists of consecutive values, which begin and end at the offsets [n + 1].

    Raises RecordError for more values than a list of Arrow can have.
    """
    import pyarrow

    if len(values) > MOST_VALUES:
        raise RecordError(
            f"a column of one rank's step has {len(values):,} values, {MOST_VALUES:,} fit: choose other columns"
        )
    buffers = [bitmap(known), pyarrow.py_buffer(offsets.astype(np.int32))]
    return pyarrow.Array.from_buffers(
        pyarrow.list_(values.type), len(offsets) - 1, buffers, children=[values]
    )


def bitmap(known: np.ndarray | None) -> "pyarrow.Buffer | None":
    import pyarrow

    return None if known is None else pyarrow.py_buffer(np.packbits(known, bitorder="little"))


def batch_of(
    step: RecordedStep, rank: int, layout: Layout, names: Collection[str] | None = None
) -> "pyarrow.RecordBatch":
    """Return a rank's rows of a step; all columns, or those of `names` in the layout's order."""
    import pyarrow

    fields = [field for field in layout.fields if names is None or field.name in names]
    columns = read_columns(step, rank, layout, names)
    arrays = [array_of(field, columns[field.name]) for field in fields]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema_of(fields))


def batches(
    record: Record, steps: Iterable[int], layout: Layout, names: Collection[str] | None = None
) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the batch of each rank of each step. Raises StepNotRecorded, DamagedRecord."""
    for number in steps:
        step = record.step(number)
        for rank in step.ranks:
            yield batch_of(step, rank, layout, names)


def table_of(
    record: Record, steps: Sequence[int] | None = None, columns: Sequence[str] | None = None
) -> "pyarrow.Table":
    """Return the samples of some steps, or all, as a table.

    Args:
        columns: those to read, in this order; all by default.

    Raises:
        RecordError: there is no such column. StepNotRecorded, DamagedRecord.
    """
    import pyarrow

    numbers = record.steps if steps is None else steps
    layout = layout_of(record, map(record.step, numbers))
    known = [field.name for field in layout.fields]
    wanted = known if columns is None else list(columns)
    if unknown := [name for name in wanted if name not in known]:
        raise RecordError(f"{record.path} has no column {unknown[0]!r}: it has {', '.join(known)}")
    schema = schema_of(field for field in layout.fields if field.name in wanted)
    found = batches(record, numbers, layout, wanted)
    return pyarrow.Table.from_batches(found, schema).select(wanted)


def frame_of(
    record: Record, steps: Sequence[int] | None = None, columns: Sequence[str] | None = None
) -> "pandas.DataFrame":
    """Return the same as a data frame; integers, which may be null, keep their types."""
    import pandas
    import pyarrow

    nullable = {
        getattr(pyarrow, name.lower())(): getattr(pandas, f"{name}Dtype")()
        for name in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
    }
    return table_of(record, steps, columns).to_pandas(types_mapper=nullable.get)
