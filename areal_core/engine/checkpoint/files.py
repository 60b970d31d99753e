"""The files of a checkpoint: checkpoint.json, and each rank's tensors as safetensors.

checkpoint.json contains the crc32c of every other file, and of itself. Format 2; format 1, of runs
with one engine, kept the actor's tensors in `tensors/`, named files relative to that, and had no
checksum of its own.

A rank writes its pieces of sharded tensors to one safetensors file. torch's distributed checkpoint
reads and reshards these files. Its `save` does not write them: it starts with collectives, which a
background thread must not make, since they would interleave with those of training. Each rank
determines without communication which pieces it writes.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from crc32c import crc32c
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from areal_core.engine.errors import CheckpointError
from areal_core.engine.sharding import mesh_coordinates

CHECKPOINT_FILE = "checkpoint.json"
CHECKPOINT_FORMAT = 2
BLOCK_BYTES = 1 << 24
NAMES_OF_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    except (ValueError, KeyError, TypeError) as error:
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
    """Parse checkpoint.json. Raises ValueError, KeyError or TypeError where it is damaged."""
    parsed = json.loads(data)
    if (seen := parsed["format"]) == 1:
        return _first_format(parsed)
    if seen != CHECKPOINT_FORMAT:
        raise _OtherFormat(seen)
    content = parsed["content"]
    if (checksum := _checksum(content)) != parsed["crc32c"]:
        raise ValueError(f"its content has crc32c {checksum}, expected {parsed['crc32c']}")
    engines = {name: SavedEngine(**engine) for name, engine in content["engines"].items()}
    return Checkpoint(**{**content, "engines": engines})


def _first_format(parsed: dict[str, Any]) -> Checkpoint:
    actor = SavedEngine("tensors", parsed["has_optimizer"], parsed["schedule"])
    files = {f"tensors/{name}": checksum for name, checksum in parsed["files"].items()}
    return Checkpoint({"actor": actor}, parsed["rng"], parsed["state"], files)


def write_checkpoint_file(folder: Path, checkpoint: Checkpoint) -> None:
    """Write checkpoint.json, with fsync."""
    content = json.loads(json.dumps(asdict(checkpoint)))  # keys as they will be read
    document = {"format": CHECKPOINT_FORMAT, "crc32c": _checksum(content), "content": content}
    write_durably(folder / CHECKPOINT_FILE, json.dumps(document, indent=1))


def _checksum(content: dict[str, Any]) -> str:
    return f"{crc32c(json.dumps(content).encode()):08x}"


def write_durably(file: Path, text: str) -> None:
    """Write a file with fsync; it gets its name only once it is complete."""
    partial = file.with_name(file.name + ".partial")
    with open(partial, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(partial, file)


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk with fsync."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that starts at `offsets` of the full tensor; on the CPU and contiguous."""

    name: str
    offsets: tuple[int, ...]
    data: Tensor


def local_pieces(tensors: Mapping[str, Tensor], rank: int, *, copy: bool) -> list[Piece]:
    """Return the pieces that this rank writes; exactly one rank writes each piece.

    Args:
        tensors: sharded, or equal on all ranks.
        copy: own the memory, because training continues while the pieces are written.
    """
    pieces = []
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not _is_writer(tensor, rank) or (local.numel() == 0 and tensor.numel() > 0):
            continue
        [item] = create_default_local_save_plan({name: tensor}, is_coordinator=True).items
        assert item.tensor_data is not None, "a tensor's item has its chunk"
        offsets = tuple(item.tensor_data.chunk.offsets)
        host = local.detach().to("cpu", copy=copy and not local.is_cuda)
        pieces.append(Piece(name, offsets, host.contiguous()))
    return pieces


def _is_writer(tensor: Tensor, rank: int) -> bool:
    """Return whether this rank writes its piece: of replicas, only the first rank's is written."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinates = mesh_coordinates(tensor)
    return all(
        i == 0
        for i, placement in zip(coordinates, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def write_pieces(file: Path, pieces: list[Piece]) -> str:
    """Write a safetensors file with fsync, read it back, and return its crc32c as 8 hex digits.

    Raises:
        OSError: it cannot be written, or reads back with different bytes.
    """
    checksum = 0
    with open(file, "wb") as stream:
        for block in _blocks(pieces):
            checksum = crc32c(block, checksum)
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    written = f"{checksum:08x}"
    if (seen := file_checksum(file)) != written:
        raise OSError(f"{file} reads back with crc32c {seen}, but {written} was written: the disk is damaged")
    return written


def _blocks(pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file: the size of the header, the header, the tensors in order."""
    header: dict[str, object] = {}
    sharding, end = {}, 0
    for piece in pieces:
        start, end = end, end + piece.data.nbytes
        header[piece.name] = {
            "dtype": NAMES_OF_DTYPES[piece.data.dtype],
            "shape": list(piece.data.shape),
            "data_offsets": [start, end],
        }
        sharding[piece.name] = {"saved_offsets": list(piece.offsets)}
    # The names that torch.distributed.checkpoint.HuggingFaceStorageReader expects.
    header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(sharding)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        yield piece.data.reshape(-1).view(torch.uint8).numpy().data
