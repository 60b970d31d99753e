"""The columns of samples: their names, alignment and unknown values, the same in every export.

    step.json of the steps ─ layout_of ─> Layout: which columns there are
    files of a rank ─ read_columns ─> Column: NumPy values, and which are known
                                        arrow.py: Arrow arrays      rows.py: JSON types

Every value per token is aligned to the token itself: what the trainer computed next-token aligned
is shifted by one, so that a row's first token has none, unless another trainer gave it.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.safety.durable import commit_file
from recorder.conversations import conversations
from recorder.errors import DamagedRecord
from recorder.format import BATCH_KEYS, IMAGE_KEYS, NUMPY_TYPES, TensorEntry
from recorder.pictures.kinds import UNKNOWN, kind_of
from recorder.reader import Record, RecordedStep
from recorder.tensors import float32_of_bits
from recorder.transcripts import text_of

MESSAGE = np.dtype([(name, "O") for name in ("role", "content", "reasoning_content", "name", "tool_calls")])
NAMES = np.dtype("O")  # texts, a list a row
# name -> dtype (None for text), and whether it is a list
CALL_COLUMNS: dict[str, tuple[np.dtype[Any] | None, bool]] = {
    "num_calls": (np.dtype("i4"), False),
    "num_tool_calls": (np.dtype("i4"), False),
    "num_failed_tool_calls": (np.dtype("i4"), False),
    "tools_used": (NAMES, True),
    "messages": (MESSAGE, True),
    "tools": (None, False),
}
Values = tuple[Any, np.ndarray | None, np.ndarray]  # values, offsets, known rows


def columns_of_calls(step: RecordedStep, rank: int) -> dict[str, Values] | None:
    """Return the columns of a rank's rows: values, offsets of lists, and the rows that have calls.

    None if the calls of agents were not recorded. Raises DamagedRecord.
    """
    rows = conversations(step, rank)
    if rows is None:
        return None
    known = np.array([row is not None for row in rows])
    uses = [[] if row is None else row.tool_uses for row in rows]
    used = [list(dict.fromkeys(use.name for use in of_row)) for of_row in uses]
    messages = [[] if row is None else [message_of(message) for message in row.messages] for row in rows]
    numbers = {
        "num_calls": [0 if row is None else len(row.calls) for row in rows],
        "num_tool_calls": [len(of_row) for of_row in uses],
        "num_failed_tool_calls": [0 if row is None else row.num_failed for row in rows],
    }
    return {
        **{name: (np.array(values, np.int32), None, known) for name, values in numbers.items()},
        "tools_used": (*joined(used, NAMES), known),
        "messages": (*joined(messages, MESSAGE), known),
        "tools": ([row and json.dumps(row.offered, ensure_ascii=False) for row in rows], None, known),
    }


def joined(rows: Sequence[Sequence[Any]], dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of all rows one after another, and where each row begins and ends."""
    items = [item for row in rows for item in row]
    values = np.empty(len(items), dtype)
    values[:] = items
    return values, np.append(0, np.cumsum([len(row) for row in rows], dtype=np.int64))


def message_of(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a recorded message as the members of MESSAGE."""
    asked = [
        {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in message.get("tool_calls", ())
    ]
    texts = (optional_text(message, name) for name in ("reasoning_content", "name"))
    return message["role"], text_of(message), *texts, asked or None


def optional_text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    return value if isinstance(value, str) else None


FINISH_REASONS = np.array(["stop", "length", "abort"])  # by number
MICRO_BATCH = np.dtype(
    [("minibatch", "i4"), ("micro_batch", "i4"), ("num_tokens", "i8"), ("loss", "f8"), ("weight", "f8")]
)
# name -> source, key and dtype of the columns that every layout begins with
FIRST = {
    "step": ("place", "step", "i8"),
    "rank": ("place", "rank", "i4"),
    "row": ("place", "row", "i4"),
    "prompt_id": ("batch", "prompt_id", ""),
    "sample_id": ("batch", "sample_id", ""),
    "num_tokens": ("lengths", "input_ids", "i4"),
    "prompt_len": ("prompt", "prompt_length", "i4"),
    "reward": ("batch", "rewards", ""),
    "finish_reason": ("finish", "finish_reason", "U6"),
    "token_ids": ("batch", "input_ids", ""),
    "loss_mask": ("batch", "loss_mask", ""),
    "logprobs": ("batch", "logprobs", ""),
    "versions": ("batch", "versions", ""),
}
LAST = ("micro_batches", "prompt", "completion", *CALL_COLUMNS, "images")
PICTURE = np.dtype([("bytes", "O"), ("path", "O")])
INNER = {"cu_seqlens", "unknown", "prompt_length"}  # tensors that are no column of their own
WHOLE = BATCH_KEYS.keys() - {"logprobs"}  # tensors whose values are known as `unknown` says


@dataclass(frozen=True)
class Field:
    """A column: where its values are, and their NumPy dtype ("" for text).

    Attributes:
        is_list: a list a row: of a value per token, or of micro-batches.
        depth: dimensions of each value beyond the row or token.
    """

    name: str
    source: str
    key: str
    dtype: np.dtype[Any] | None
    is_list: bool = False
    depth: int = 0


@dataclass(frozen=True)
class Layout:
    """The columns of some steps; `from_elsewhere` is true for a record of another trainer.

    Its values that are NaN, and lists of nothing but what FORMAT.md stores for a row that lacks
    them, are not known. Pictures are bytes, or files in the folder `pictures` and their paths.
    """

    fields: tuple[Field, ...]
    from_elsewhere: bool
    pictures: Path | None = None


@dataclass(frozen=True)
class Column:
    """Values of a rank's rows.

    `values` are [rows, ...], or with `offsets` [rows + 1] those of all rows one after another. What
    is not `known` [rows], or in a list not `known_values`, is null; None means that all are known.
    """

    values: Any
    offsets: np.ndarray | None = None
    known: np.ndarray | None = None
    known_values: np.ndarray | None = None

    def rows(self, begin: int, end: int) -> list[Any]:
        """Return the values of some rows as JSON types; None if they are not known."""
        if self.offsets is None:
            return masked(plain_values(self.values[begin:end]), self.known, begin, end)
        first, last = self.offsets[begin], self.offsets[end]
        values = masked(plain_values(self.values[first:last]), self.known_values, first, last)
        bounds = (self.offsets[begin : end + 1] - first).tolist()
        return masked([values[low:high] for low, high in pairwise(bounds)], self.known, begin, end)

    def is_finite(self) -> bool:
        """Whether no known number is infinite or NaN, as far as that is quick to find out."""
        if isinstance(self.values, list) or self.values.dtype.kind in "iubU":
            return True
        if self.values.dtype == MICRO_BATCH:
            return bool((np.isfinite(self.values["loss"]) & np.isfinite(self.values["weight"])).all())
        if self.values.dtype.kind != "f":
            return not len(self.values)
        known = self.known_values
        if self.known is not None:
            known_rows = self.known if self.offsets is None else np.repeat(self.known, np.diff(self.offsets))
            known = known_rows if known is None else known & known_rows
        return bool(np.isfinite(self.values if known is None else self.values[known]).all())


def masked(values: list[Any], known: np.ndarray | None, begin: int, end: int) -> list[Any]:
    if known is None:
        return values
    return [
        value if is_known else None for value, is_known in zip(values, known[begin:end].tolist(), strict=True)
    ]


def plain_values(values: Any) -> list[Any]:
    """Return NumPy values as JSON types; a micro-batch, message and picture as an object."""
    if getattr(values, "dtype", None) in (MICRO_BATCH, MESSAGE, PICTURE):
        return [dict(zip(values.dtype.names, item, strict=True)) for item in values.tolist()]
    return values.tolist() if isinstance(values, np.ndarray) else values


def layout_of(record: Record, steps: Iterable[RecordedStep]) -> Layout:
    """Return the columns of steps: the union, in one order. Raises DamagedRecord."""
    found: dict[tuple[str, str, str, int], np.dtype[Any]] = {}
    kinds: set[str] = set()
    for step in steps:
        kinds |= {name.partition("-")[0] for name in step.manifest.files}
        for name, entry in step.manifest.batches.items():
            source = name.partition("-")[0]
            for key, tensor in entry.tensors.items():
                if key in IMAGE_KEYS:
                    kinds |= {"images"} if key == "image_sha256" else set()
                    continue
                place = (source, key, tensor.axis, len(tensor.shape))
                dtype = dtype_of(tensor)
                if found.setdefault(place, dtype) != dtype:
                    found[place] = np.promote_types(found[place], dtype)
    fields = {}
    for name, (source, key, own) in FIRST.items():
        axis, dtype = next(
            ((place[2], dtype) for place, dtype in found.items() if place[:2] == ("batch", key)),
            ("row", np.dtype(np.int64)),
        )
        is_list = source == "batch" and axis == "token"
        fields[name] = Field(name, source, key, np.dtype(own) if own else dtype, is_list)
    of_first = {key for _, key, _ in FIRST.values()}
    for (source, key, axis, num_dims), dtype in sorted(found.items(), key=lambda item: item[0]):
        if key in INNER or (source == "batch" and key in of_first):
            continue
        name = key
        while name in fields or name in LAST:
            name = f"{source}.{name}"
        fields[name] = Field(name, source, key, dtype, axis == "token", num_dims - 1)
    if "outcome" in kinds:
        fields["micro_batches"] = Field("micro_batches", "outcome", "", MICRO_BATCH, is_list=True)
    if "text" in kinds:
        fields |= {name: Field(name, "text", name, None) for name in ("prompt", "completion")}
    if "calls" in kinds:
        fields |= {name: Field(name, "calls", name, *kind) for name, kind in CALL_COLUMNS.items()}
    if "images" in kinds:
        fields["images"] = Field("images", "images", "", PICTURE, is_list=True)
    return Layout(tuple(fields.values()), record.header.trainer is not None)


def dtype_of(tensor: TensorEntry) -> np.dtype[Any]:
    """Return the dtype of a tensor's values: float32 for 16-bit floats, bits for 8-bit ones."""
    return np.dtype(np.float32) if tensor.dtype in ("BF16", "F16") else NUMPY_TYPES[tensor.dtype]


def numbers_of(array: np.ndarray, tensor: TensorEntry) -> np.ndarray:
    """Return an array as `dtype_of` says; every bfloat16 is a float32."""
    if tensor.dtype == "BF16":
        return float32_of_bits(array)
    return array.astype(dtype_of(tensor), copy=False)


def read_columns(
    step: RecordedStep, rank: int, layout: Layout, names: Collection[str] | None = None
) -> dict[str, Column]:
    """Read a rank's columns, all or those of `names`, in the order of the layout.

    Only the tensors that they need are read. Raises DamagedRecord.
    """
    fields = [field for field in layout.fields if names is None or field.name in names]
    entry = step.batch_entry(rank)[1]
    sources = {field.source for field in fields}
    wanted = {field.key for field in fields if field.source in ("batch", "finish")}
    if sources & {"lengths", "prompt", "learning"} or any(field.is_list for field in fields):
        wanted.add("cu_seqlens")
    if "prompt" in sources:
        wanted |= {"prompt_length", "loss_mask"}
    if layout.from_elsewhere and "logprobs" in wanted:
        wanted |= {"loss_mask", "prompt_length"}
    batch = step.batch(rank, wanted & entry.tensors.keys()) if wanted else {}
    learning = read_learning(step, rank, fields, batch) if "learning" in sources else {}
    texts = step.text(rank) if "text" in sources and has_file(step, "text", rank, "jsonl") else None
    calls = columns_of_calls(step, rank) if "calls" in sources else None
    columns = {}
    for field in fields:
        if field.source == "outcome":
            column = micro_batches_of(step, rank)
        elif field.source == "text":
            column = None if texts is None else Column([line[field.key] for line in texts])
        elif field.source == "calls":
            column = None if calls is None else Column(*calls[field.key])
        elif field.source == "learning":
            column = learning.get(field.name)
        elif field.source == "images":
            column = pictures_of_rows(step, rank, layout.pictures)
        else:
            column = batch_column(step, rank, field, batch)
        if column is None:
            column = absent(field, entry.num_rows)
        elif layout.from_elsewhere and (field.source == "learning" or field.key in batch.keys() - WHOLE):
            if field.key == "logprobs":  # FORMAT.md: a 0 outside of the mask is unknown
                given = written_by_model(step, rank, batch) | (column.values != 0)
                column = replace(column, known_values=given)
            column = without_placeholders(column)
        columns[field.name] = column
    return columns


def batch_column(step: RecordedStep, rank: int, field: Field, batch: dict[str, np.ndarray]) -> Column | None:
    entry = step.batch_entry(rank)[1]
    if field.source == "place":
        places = {"step": step.manifest.step, "rank": rank}
        rows = np.arange(entry.num_rows, dtype=field.dtype)
        return Column(np.full_like(rows, places[field.key]) if field.key in places else rows)
    known = known_rows(step, rank, field.key)
    if field.source == "lengths":
        lengths = np.diff(batch["cu_seqlens"])
        return Column(lengths.astype(field.dtype), known=None if known is None else known | (lengths > 0))
    if field.source == "prompt":
        return prompt_lengths(step, rank, batch)
    if field.source == "finish":
        return Column(FINISH_REASONS[batch[field.key]], known=known)
    tensor = entry.tensors.get(field.key)
    if tensor is None or not fits(field, tensor):
        return None
    values = numbers_of(batch[field.key], tensor)
    return Column(values, batch["cu_seqlens"] if field.is_list else None, known)


def fits(field: Field, tensor: TensorEntry) -> bool:
    """Return whether a step's tensor is that of the column, which is one of all steps."""
    return (tensor.axis == "token", len(tensor.shape) - 1) == (field.is_list, field.depth)


def known_rows(step: RecordedStep, rank: int, key: str) -> np.ndarray | None:
    """Return the rows [rows] whose value is known; None if all are."""
    known = step.known(rank, key)
    return None if known.all() else known


def prompt_lengths(step: RecordedStep, rank: int, batch: dict[str, np.ndarray]) -> Column:
    """Count the tokens before the completion: as recorded, or before the first in the loss mask."""
    bounds = batch["cu_seqlens"]
    trained = np.append(np.flatnonzero(batch["loss_mask"]), bounds[-1])
    first = trained[np.searchsorted(trained, bounds[:-1])]  # in the row, or a later one
    lengths = np.minimum(first, bounds[1:]) - bounds[:-1]
    known = step.known(rank, "loss_mask") & (step.known(rank, "input_ids") | (np.diff(bounds) > 0))
    if "prompt_length" in batch:
        given = step.known(rank, "prompt_length")
        lengths, known = np.where(given, batch["prompt_length"], lengths), known | given
    return Column(lengths.astype(np.int32), known=known)


def written_by_model(step: RecordedStep, rank: int, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Return the tokens [tokens] of the mask; in a row without one, those behind the prompt."""
    bounds, trained = batch["cu_seqlens"], batch["loss_mask"] != 0
    if "prompt_length" not in batch:
        return trained
    has_no_mask = step.known(rank, "prompt_length") & ~step.known(rank, "loss_mask")
    begins = np.where(has_no_mask, bounds[:-1] + batch["prompt_length"], bounds[1:])
    return trained | (np.arange(bounds[-1]) >= np.repeat(begins, np.diff(bounds)))


def read_learning(
    step: RecordedStep, rank: int, fields: Iterable[Field], batch: dict[str, np.ndarray]
) -> dict[str, Column]:
    """Read what the trainer computed; per token, aligned to the token itself."""
    if not has_file(step, "learning", rank, "safetensors"):
        return {}
    name = step.rank_name("learning", rank, "safetensors")
    tensors = step.manifest.batches[name].tensors
    chosen = {
        field.name: field
        for field in fields
        if field.source == "learning" and field.key in tensors and fits(field, tensors[field.key])
    }
    arrays = step.learning(rank, {*(field.key for field in chosen.values()), "cu_seqlens"})
    bounds, batch_tensors = batch["cu_seqlens"], step.batch_entry(rank)[1].tensors
    if not np.array_equal(arrays["cu_seqlens"], bounds):
        raise DamagedRecord(step.name_of(name), "has other rows than the batch", "cu_seqlens")
    columns = {}
    for column, field in chosen.items():
        values = numbers_of(arrays[field.key], tensors[field.key])
        if not field.is_list:
            columns[column] = Column(values)
            continue
        first = bounds[:-1][np.diff(bounds) > 0]
        shifted, has_value = np.roll(values, 1, axis=0), np.ones(len(values), bool)
        if "unknown" in batch_tensors:  # of another trainer: the last position is the first token's
            shifted[first] = values[bounds[1:][np.diff(bounds) > 0] - 1]
        else:
            has_value[first] = False
        columns[column] = Column(shifted, bounds, known_values=has_value)
    return columns


def without_placeholders(column: Column) -> Column:
    """Take for unknown what is stored where another trainer knows nothing.

    That is NaN, and a list of nothing but -1 or the largest unsigned number.
    """
    values = column.values
    if values.dtype.kind == "f":
        given = ~np.isnan(values)
    elif values.dtype.kind in "iu" and column.offsets is not None:
        given = values != (-1 if values.dtype.kind == "i" else np.iinfo(values.dtype).max)
    else:
        return column
    given = given.any(axis=tuple(range(1, given.ndim)))
    if column.known_values is not None:
        given &= column.known_values
    if column.offsets is None:
        return replace(column, known=given)
    counts = np.diff(np.append(0, np.cumsum(given))[column.offsets])
    known = counts > 0 if column.known is None else (counts > 0) & column.known
    return replace(
        column, known=known, known_values=given if values.dtype.kind == "f" else column.known_values
    )


def micro_batches_of(step: RecordedStep, rank: int) -> Column | None:
    if not has_file(step, "outcome", rank, "json"):
        return None
    num_rows = step.num_rows(rank)
    passes = step.outcome(rank).micro_batches
    rows = np.fromiter(chain.from_iterable(item.rows for item in passes), np.int64)
    if len(rows) and rows.max() >= num_rows:
        name = step.name_of(step.rank_name("outcome", rank, "json"))
        raise DamagedRecord(name, f"has row {rows.max()}, the batch {num_rows} rows")
    facts = [(p.minibatch, p.micro_batch, p.num_tokens, p.loss, p.weight) for p in passes]
    number = np.repeat(np.arange(len(passes)), [len(item.rows) for item in passes])
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=num_rows)
    offsets = np.append(0, np.cumsum(counts))
    return Column(np.array(facts, MICRO_BATCH)[number[order]], offsets, counts > 0)


def pictures_of_rows(step: RecordedStep, rank: int, folder: Path | None) -> Column | None:
    """Return the pictures of each row; with a folder they are written there, each once."""
    named = step.pictures(rank)
    if named is None:
        return None
    each: dict[str, tuple[bytes | None, str | None]] = {}
    for name, size_bytes in dict(named).items():
        data = step.picture(name, size_bytes)
        kind = kind_of(data)
        file = f"{name}.{kind.format.lower()}" if kind != UNKNOWN else name
        if folder is None:
            each[name] = data, file
            continue
        folder.mkdir(exist_ok=True)
        path = folder / file
        if not (path.is_file() and path.stat().st_size == size_bytes):
            commit_file(path, data)
        each[name] = None, str(path)
    values = np.empty(len(named), PICTURE)
    values[:] = [each[name] for name, _ in named]
    counts = [len(row) for row in step.pictures_of_rows(rank)]
    return Column(values, np.append(0, np.cumsum(counts, dtype=np.int64)))


def has_file(step: RecordedStep, kind: str, rank: int, suffix: str) -> bool:
    name = step.rank_name(kind, rank, suffix)
    return name in step.manifest.files or name in step.manifest.batches


def absent(field: Field, num_rows: int) -> Column:
    """Return a column of which the step has nothing."""
    nothing = np.zeros(num_rows, bool)
    if field.dtype is None:
        return Column([None] * num_rows, known=nothing)
    shape = (0 if field.is_list else num_rows, *[0] * field.depth)
    return Column(
        np.zeros(shape, field.dtype), np.zeros(num_rows + 1, np.int64) if field.is_list else None, nothing
    )
