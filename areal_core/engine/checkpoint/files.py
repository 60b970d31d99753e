"""checkpoint.json, which makes a checkpoint complete: the crc32c of every other file, and its
own.

Imports no torch, because a replay checks its checkpoint before it starts ranks. Format 2; format 1,
of runs with one engine, kept the actor's tensors in `tensors/`, named files relative to that, and
had no checksum of its own.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c

from areal_core.errors import CheckpointError
from areal_core.safety.durable import commit_file

CHECKPOINT_FILE = "checkpoint.json"
CHECKPOINT_FORMAT = 2
BLOCK_BYTES = 1 << 24
DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    msgspec.MsgspecError,
)


@dataclass(frozen=True)
class SavedEngine:
    """One engine in a checkpoint; its tensors are in `folder`, relative to the checkpoint's."""

    folder: str
    has_optimizer: bool
    schedule: dict[str, Any] | None


@dataclass(frozen=True)
class Checkpoint:
    """The content of checkpoint.json.

    Args:
        engines: by their names in the run.
        rng: `rng_state()` of each rank.
        state: of the training loop, as JSON types.
        files: crc32c of each file, by its path relative to the folder.
    """

    engines: dict[str, SavedEngine]
    rng: list[dict[str, str]]
    state: dict[str, Any]
    files: dict[str, str]


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Read checkpoint.json and check every file that it names.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another format.
    """
    checkpoint = read_checkpoint_file(folder)
    check_files(folder, checkpoint.files.items())
    return checkpoint


def read_checkpoint_file(folder: str | Path) -> Checkpoint:
    """Read checkpoint.json alone. Raises as `read_checkpoint` does."""
    file = Path(folder) / CHECKPOINT_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no {CHECKPOINT_FILE}: it is not a checkpoint, or was not written completely"
        )
    try:
        return parse_checkpoint(file.read_bytes())
    except _OtherFormat as other:
        raise CheckpointError(
            f"{file} has format {other}, this version reads formats up to {CHECKPOINT_FORMAT}: update areal-debug"
        ) from None
    except DAMAGED as error:
        raise CheckpointError(f"{file} is damaged ({error}): use another one") from error


def check_files(folder: str | Path, files: Iterable[tuple[str, str]]) -> None:
    """Raise CheckpointError for the first file, (path, crc32c), that is missing or damaged."""
    for name, checksum in files:
        path = Path(folder) / name
        if not path.is_file() or file_checksum(path) != checksum:
            raise CheckpointError(f"{path} is missing or damaged: use another one")


def file_checksum(file: Path) -> str:
    """Return the crc32c of a file as 8 hex digits."""
    checksum = 0
    with open(file, "rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            checksum = crc32c(block, checksum)
    return f"{checksum:08x}"


class _OtherFormat(Exception):
    """An unknown format, its argument."""


def parse_checkpoint(data: bytes) -> Checkpoint:
    """Parse checkpoint.json. Raises one of DAMAGED where it is."""
    parsed = json.loads(data)
    if (seen := parsed["format"]) == 1:
        return _first_format(parsed)
    if seen != CHECKPOINT_FORMAT:
        raise _OtherFormat(seen)
    content = parsed["content"]
    if (checksum := _checksum(content)) != parsed["crc32c"]:
        raise ValueError(f"its content has crc32c {checksum}, expected {parsed['crc32c']}")
    return msgspec.convert(content, Checkpoint)


def _first_format(parsed: dict[str, Any]) -> Checkpoint:
    actor = SavedEngine("tensors", parsed["has_optimizer"], parsed["schedule"])
    files = {f"tensors/{name}": checksum for name, checksum in parsed["files"].items()}
    return Checkpoint({"actor": actor}, parsed["rng"], parsed["state"], files)


def write_checkpoint_file(folder: Path, checkpoint: Checkpoint) -> None:
    content = json.loads(json.dumps(asdict(checkpoint)))  # keys as they will be read
    document = {"format": CHECKPOINT_FORMAT, "crc32c": _checksum(content), "content": content}
    commit_file(folder / CHECKPOINT_FILE, json.dumps(document, indent=1).encode())


def _checksum(content: dict[str, Any]) -> str:
    return f"{crc32c(json.dumps(content).encode()):08x}"
