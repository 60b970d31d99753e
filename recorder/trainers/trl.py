"""TRL: `completions/completions_{step}.parquet` of `log_completions`, text for inspection.

Columns are step, prompt, completion, one per reward function, others that were logged, advantage.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_core.safety.printable import printable
from areal_core.safety.received import MOST_BYTES, read_received
from recorder.errors import ForeignFormat, RecordError, UnfinishedFile
from recorder.pictures.kinds import encoded
from recorder.trainers.foreign import BY_PROMPT, NO_FILES, TEXT_ONLY, number_or_none
from recorder.trainers.sample import Sample

FILES = r"completions_\d+\.parquet"
FIXED = ("step", "prompt", "completion", "advantage")
MAGIC = b"PAR1"  # first and last bytes of a Parquet file
MAX_ROWS = 100_000
NOTES = (
    TEXT_ONLY,
    BY_PROMPT,
    "the log has the last generation batch before each step, and no special tokens",
)
SEVERAL = (
    "there are several columns of numbers, and the weights of reward functions are not in the file: "
    "rewards are unknown, and each column is a score"
)


def read_table(file: Path, notes: list[str]) -> list[Sample]:
    """Read the rows of a file. Raises ForeignFormat, and RecordError without pyarrow."""
    return [parse_row(row, notes, f"{file}, row {number}") for number, row in enumerate(table_rows(file))]


def table_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file. Raises ForeignFormat, UnfinishedFile, RecordError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise RecordError("reading Parquet needs pyarrow: pip install pyarrow") from None
    data = read_received(file, MOST_BYTES)
    if not data.startswith(MAGIC) or not data.endswith(MAGIC):
        raise UnfinishedFile(f"{file} is cut off: it does not end as a Parquet file")
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others reserve more than the child has
    try:
        content = parquet.ParquetFile(pyarrow.BufferReader(data))
        if content.metadata.num_rows > MAX_ROWS:
            raise ForeignFormat(f"{file} has {content.metadata.num_rows} rows, {MAX_ROWS} at most are read")
        rows: list[dict[str, Any]] = content.read(use_threads=False).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, MemoryError):
            raise
        raise ForeignFormat(
            f"{file} is no Parquet file that can be read ({printable(str(error), 200)})"
        ) from None
    if rows and not set(FIXED) <= rows[0].keys():
        raise ForeignFormat(f"{file} has columns {sorted(rows[0])[:20]}, and lacks one of {FIXED}")
    return rows


def parse_row(row: Mapping[str, Any], notes: list[str], where: str) -> Sample:
    """Parse one row; a single column of numbers is the reward."""
    numbers = {
        name: number_or_none(value, where)
        for name, value in row.items()
        if name not in FIXED and (value is None or isinstance(value, int | float))
    }
    scores = {} if len(numbers) == 1 else numbers
    notes += [SEVERAL] if scores else []
    prompt, completion = (text_of(row[name]) for name in ("prompt", "completion"))
    return Sample(
        tokens=None,
        reward=next(iter(numbers.values())) if len(numbers) == 1 else None,
        group=prompt,
        text=(prompt, completion),
        scores=scores | {"advantage": number_or_none(row["advantage"], f"{where}, advantage")},
        images=images_of(row, notes),
    )


def images_of(row: Mapping[str, Any], notes: list[str]) -> tuple[bytes, ...]:
    """Return the files of pictures in the columns of the data set, as `datasets` stores them."""
    found = [row[name] for name in ("images", "image") if row.get(name) is not None]
    values = [value for item in found for value in (item if isinstance(item, list) else [item])]
    files = [value.get("bytes") if isinstance(value, dict) else None for value in values]
    notes += (
        [NO_FILES] if None in files or ({"type": "image"} in parts_of(row["prompt"]) and not files) else []
    )
    return tuple(encoded(file, "an image") for file in files if file is not None)


def parts_of(prompt: Any) -> list[Any]:
    """Return the items of messages that are no text, by their type."""
    messages = [item for item in prompt if isinstance(item, dict)] if isinstance(prompt, list) else []
    items = [item for message in messages for item in message.get("content") or () if isinstance(item, dict)]
    return [{"type": item.get("type")} for item in items]


def text_of(value: Any) -> str:
    """Return text: itself, or that of messages and of the items of their content."""
    if isinstance(value, list):
        return "\n".join(map(text_of, value))
    if isinstance(value, dict):
        return text_of(value.get("content", value.get("text")))
    return "" if value is None else str(value)
