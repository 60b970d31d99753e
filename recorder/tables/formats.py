"""Export a record as files of other tools: thin layers on its Arrow batches and rows.

Parquet is one file, or FOLDER/step=12/part-0.parquet for each step, a table for DuckDB, Polars and
Ray Data; a dataset of Hugging Face is as its `save_to_disk` writes it, without that package, which
imports slowly and writes temporary files. slime's files also load with `weights_only=True`.
"""

import base64
import io
import json
import os
import pickle
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from areal_core.safety.durable import commit_file, replacing
from areal_core.safety.scratch import unfinished_folder
from recorder.documents import json_text
from recorder.errors import DamagedRecord, RecordError, RecordExists
from recorder.format import BATCH_KEYS
from recorder.reader import Damage, Record, RecordedStep, open_record
from recorder.tables.arrow import batches, schema_of
from recorder.tables.columns import Layout, layout_of, read_columns
from recorder.verify import steps_to_copy

if TYPE_CHECKING:
    import pyarrow

STEP_FIELD = "{step}"
BLOCK_TOKENS = 1 << 16  # of rows that are converted together


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
        for rank in step.ranks:
            for row, _ in rows_of_rank(step, rank, layout, names):
                yield row


def rows_of_rank(
    step: RecordedStep, rank: int, layout: Layout, names: Collection[str] | None
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the samples of a rank, and whether all of their numbers are known to be finite."""
    columns = read_columns(step, rank, layout, names)
    is_finite = all(column.is_finite() for column in columns.values())
    entry = step.batch_entry(rank)[1]
    # converted in blocks: one value at a time takes three times as long, all at once much memory
    size = max(1, BLOCK_TOKENS * entry.num_rows // max(1, entry.num_tokens))
    for begin in range(0, entry.num_rows, size):
        end = min(begin + size, entry.num_rows)
        for values in zip(*(column.rows(begin, end) for column in columns.values()), strict=True):
            yield dict(zip(columns, values, strict=True)), is_finite


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


def write_jsonl(
    record: Record, file: Path, steps: Sequence[int], overwrite: bool, pictures: Path | None = None
) -> list[Path]:
    """Write one file with all steps, atomically."""
    check_file(file, overwrite)
    layout = layout_of_steps(record, steps, pictures)
    with replacing(file) as out:
        for step in map(record.step, steps):
            for rank in step.ranks:
                for row, is_finite in rows_of_rank(step, rank, layout, None):
                    out.write(json_line(row, is_finite))
    return [file]


def json_line(row: dict[str, Any], is_finite: bool) -> bytes:
    for picture in row.get("images") or ():
        if picture["bytes"] is not None:
            picture["bytes"] = base64.b64encode(picture["bytes"]).decode()
    # a quarter of the time; but it writes null for NaN, and separators of lines as they are
    line = msgspec.json.encode(row) if is_finite else b""
    return (line if line and line.isascii() else json_text(row).encode()) + b"\n"


ROW_GROUP = 64
PARTITION, FILE_NAME = "step=", "part-0.parquet"


def write_parquet(
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


DATA_FILE, STATE_FILE, INFO_FILE = "data-00000-of-00001.arrow", "state.json", "dataset_info.json"


def write_hugging_face(
    record: Record, folder: Path, steps: Sequence[int], overwrite: bool, pictures: Path | None = None
) -> list[Path]:
    """Write one dataset with all steps, atomically."""
    import pyarrow

    check_folder(folder, overwrite, lambda place: (place / STATE_FILE).is_file())
    layout = layout_of_steps(record, steps, pictures)
    state: dict[str, Any] = {
        "_data_files": [{"filename": DATA_FILE}],
        "_fingerprint": secrets.token_hex(8),  # names what is computed from the dataset, in a cache
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    with unfinished_folder(folder) as content:
        content.mkdir()
        schema = schema_of(layout.fields)
        with (content / DATA_FILE).open("wb") as file, pyarrow.ipc.new_stream(file, schema) as out:
            for batch in batches(record, steps, layout):
                out.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        (content / STATE_FILE).write_text(json.dumps(state))
        (content / INFO_FILE).write_text("{}")  # columns and types are those of the file
    return [folder]


DTYPES = {"rewards": np.float32, "logprobs": np.float32, "prompt_id": np.int64, "unknown": np.uint8}


def write_torch(
    document_of: Callable[[Record, int], dict[str, Any]],
    record: Record,
    file: Path,
    steps: Sequence[int],
    overwrite: bool,
    **options: Any,
) -> list[Path]:
    """Write one file of `torch.save` per step, each atomically."""
    import torch

    files = {step: file_of_step(file, step, len(steps)) for step in steps}
    for step, path in files.items():
        check_file(path, overwrite)
        packed = io.BytesIO()  # torch turns an error of a file into one without its reason
        torch.save(document_of(record, step), packed, **options)
        commit_file(path, packed.getvalue())
    return list(files.values())


def padded_tensors(record: Record, step: int) -> dict[str, Any]:
    import torch

    return {key: torch.from_numpy(array) for key, array in padded(record.step(step)).items()}


def padded(step: RecordedStep) -> dict[str, np.ndarray[Any, Any]]:
    """Return the rows of all ranks as [B, T] and [B] arrays, padded with 0 on the right."""
    keys = [
        *BATCH_KEYS,
        *(["unknown"] if any("unknown" in step.batch_entry(rank)[1].tensors for rank in step.ranks) else []),
    ]
    batches = [step.batch(rank, set(keys) & step.batch_entry(rank)[1].tensors.keys()) for rank in step.ranks]
    lengths = np.concatenate([np.diff(batch["cu_seqlens"]) for batch in batches])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    arrays = {"attention_mask": mask}
    for key in keys[1:]:
        dtype = DTYPES.get(key, np.int32)
        rows = [np.zeros(len(b["rewards"]), dtype) if key not in b else b[key] for b in batches]
        flat = np.concatenate(rows).astype(dtype)
        if BATCH_KEYS.get(key, ("", "row"))[1] == "token":
            arrays[key] = np.zeros(mask.shape, dtype)
            arrays[key][mask] = flat
        else:
            arrays[key] = flat
    return arrays


# by finish reason; slime has no word for one that is not known, and "pending" is its default
STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted", None: "pending"}
SLIME_COLUMNS = (
    "step", "prompt_id", "sample_id", "prompt_len", "reward", "finish_reason",
    "token_ids", "loss_mask", "logprobs", "versions", "prompt", "completion", "messages", "tools",
)  # fmt: skip


def slime_rollout(record: Record, step: int) -> dict[str, Any]:
    rows = read_rows(record, [step], layout_of_steps(record, [step]), SLIME_COLUMNS)
    return {"rollout_id": step, "samples": [slime_sample(row, index) for index, row in enumerate(rows)]}


class WithoutTensors:
    """A pickle module whose pickler does not ask torch about each number, for half of the time."""

    class Pickler:
        """Dump what holds no tensor."""

        def __init__(self, file: IO[bytes], protocol: int) -> None:
            self.dump = pickle.Pickler(file, protocol).dump


def slime_sample(row: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a row as `Sample.to_dict()` of slime; what is not known is None.

    The response begins behind the prompt. Without one that is known it is the whole row.
    """
    tokens, mask, versions = row["token_ids"] or [], row["loss_mask"], row["versions"] or []
    begin = row["prompt_len"] or 0
    trained = [version for version, kept in zip(versions, mask or [1] * len(tokens), strict=False) if kept]
    return {
        "group_index": row["prompt_id"],
        "index": index,
        "rollout_id": row["step"],
        "prompt": row.get("prompt") or "",
        "tokens": tokens,
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": row.get("completion") or "",
        "response_length": len(tokens) - begin,
        "label": None,
        "reward": row["reward"],
        "loss_mask": None if mask is None else mask[begin:],
        "weight_versions": [str(version) for version in dict.fromkeys(trained)],
        "rollout_log_probs": None if row["logprobs"] is None else row["logprobs"][begin:],
        "rollout_routed_experts": None,
        "teacher_log_probs": None,
        "remove_sample": False,
        "status": STATUS[row["finish_reason"]],
        "metadata": {"sample_id": row["sample_id"]}
        | {name: row[name] for name in ("messages", "tools") if row.get(name) is not None},
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {
            "spec_accept_token_num": 0,
            "spec_draft_token_num": 0,
            "spec_verify_ct": 0,
            "completion_token_num": 0,
        },
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    }


FORMATS: dict[str, Callable[..., list[Path]]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "pt": partial(write_torch, padded_tensors),
    "slime": partial(write_torch, slime_rollout, pickle_module=WithoutTensors),
    "hf": write_hugging_face,
}
TABLES = ("jsonl", "parquet", "hf")
TABLE_LACKS = ("plans, statistics, checksums and anchors",)
# Data that each format cannot represent.
LOST = {
    "jsonl": TABLE_LACKS,
    "parquet": TABLE_LACKS,
    "hf": TABLE_LACKS,
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
    """The written files, and what the format cannot represent.

    `left_out` has a sentence for each damaged file because of which a step was left out.
    """

    files: tuple[str, ...]
    steps: tuple[int, ...]
    lost: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def export_record(
    source: str | os.PathLike[str],
    format_name: str,
    destination: Path,
    step: int | None = None,
    overwrite: bool = False,
    images: str = "bytes",
    skip_damaged: bool = False,
) -> Exported:
    """Write the steps of a record, or one of them, in the format of another tool.

    Every byte of them is checked before a file is written.

    Args:
        destination: a file; a format with one file per step needs `{step}` in the name if there are
            several. A folder for "hf", and for "parquet" unless the name ends in .parquet.
        images: in a table, "bytes" of pictures, or the paths of "files" in DESTINATION.images.
        skip_damaged: leave out the steps that are damaged.

    Raises:
        RecordError: the record cannot be read, or the destination exists.
    """
    damage = Damage()
    record = open_record(source, damage)
    steps, left_out = steps_to_copy(record, record.steps if step is None else (step,), skip_damaged)
    if left_out and not steps:
        raise DamagedRecord("steps", f"none is intact: {left_out[0]}")
    if not steps:
        raise RecordError(f"{record.path} has no finished and intact step: there is nothing to export")
    if not destination.parent.is_dir():
        raise RecordError(f"{destination.parent} is not a folder: create it first")
    options = {}
    if format_name in TABLES and images == "files":
        options["pictures"] = destination.with_name(f"{destination.name}.images")
    files = FORMATS[format_name](record, destination, steps, overwrite, **options)
    return Exported(tuple(map(str, files)), steps, LOST[format_name], (*left_out, *damage.found))
