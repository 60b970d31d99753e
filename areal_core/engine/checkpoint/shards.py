"""Each rank's tensors of a checkpoint, as one safetensors file.

A rank writes its pieces of sharded tensors. torch's distributed checkpoint reads and reshards these
files. Its `save` does not write them: it starts with collectives, which a background thread must
not make, since they would interleave with those of training. Each rank determines without
communication which pieces it writes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from crc32c import crc32c
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_core.engine.checkpoint.files import file_checksum
from areal_core.engine.checksums import memory_of
from areal_core.engine.sharding import mesh_coordinates
from areal_core.safety.durable import replacing

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
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

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
    with replacing(file) as stream:
        for block in _blocks(pieces):
            checksum = crc32c(block, checksum)
            stream.write(block)
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
        yield memory_of(piece.data)
