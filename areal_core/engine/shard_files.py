"""One rank's pieces of sharded tensors as a safetensors file, which torch's distributed checkpoint reads and shards anew.

They are written here and not by `dcp.save`, whose every write begins with collectives, which a background thread must not
make: they would get between those of training. Each rank knows alone which pieces are its own to write.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from crc32c import crc32c
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from areal_core.engine.checkpoint_file import file_checksum

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
class Piece:
    """A part of a tensor that begins at `offsets` of the whole; on the CPU and contiguous."""

    name: str
    offsets: tuple[int, ...]
    data: Tensor


def local_pieces(tensors: Mapping[str, Tensor], rank: int, *, copy: bool) -> list[Piece]:
    """What this rank writes of tensors that are sharded, or equal on all ranks; no piece is written by two ranks.

    Args:
        copy: own the memory, because training goes on while the pieces are written.
    """
    pieces = []
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not _is_writer(tensor, rank) or (local.numel() == 0 and tensor.numel() > 0):
            continue
        [item] = create_default_local_save_plan({name: tensor}, is_coordinator=True).items
        offsets = tuple(item.tensor_data.chunk.offsets)
        host = local.detach().to("cpu", copy=copy and not local.is_cuda)
        pieces.append(Piece(name, offsets, host.contiguous()))
    return pieces


def _is_writer(tensor: Tensor, rank: int) -> bool:
    """Whether a piece is this rank's to write: where several hold the same one, the first of them is."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    where = tensor.device_mesh.get_coordinate()
    return all(
        i == 0 for i, placement in zip(where, tensor.placements, strict=True) if placement.is_replicate()
    )


def write_pieces(file: Path, pieces: list[Piece]) -> str:
    """Writes a safetensors file onto the disk, reads it back, and returns the crc32c of its bytes.

    Raises:
        OSError: it cannot be written, or the disk gives back other bytes.
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
        raise OSError(f"{file} reads back with crc32c {seen}, and {written} was written: the disk is damaged")
    return written


def _blocks(pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    """The bytes of the file: the size of the header, the header, the tensors one after the other."""
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
    # The names that torch.distributed.checkpoint.HuggingFaceStorageReader looks for.
    header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(sharding)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        yield piece.data.reshape(-1).view(torch.uint8).numpy().data
