"""One crc32c per parameter, independent of the number of ranks that it is sharded over.

Each rank computes the checksum of its own shard, at memory speed, and the checksums of the shards
are combined as if the shards had been concatenated. So runs on different numbers of ranks can be
compared, and the value equals that of the tensor's bytes in a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, cast

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from areal_core.engine.lora import trained_parameters
from areal_core.engine.ranks import Ranks
from areal_core.engine.sharding import mesh_coordinates

POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


@dataclass(frozen=True)
class ShardChecksum:
    """crc32c of some rows of a tensor. The shards, ordered by `position`, are the full tensor."""

    position: tuple[int, ...]
    crc32c: int
    size_bytes: int


class Checksums(NamedTuple):
    """crc32c as 8 hex digits: of each whole tensor by name, and of all shards of each rank."""

    tensors: dict[str, str]
    shards: list[str]


def parameter_checksums(model: torch.nn.Module, ranks: Ranks) -> Checksums:
    """Return the checksums of every trained parameter, on every rank; a collective.

    FSDP2 shards parameters along their first dimension. Where tensor parallelism shards along
    another one, a rank gathers the columns of its rows, one parameter at a time.
    """
    return _checksums(trained_parameters(model), ranks)


def local_checksums(model: torch.nn.Module) -> dict[str, str]:
    """Return the checksum of every trained parameter of a model that is whole in this process."""
    return {
        name: f"{_shard_checksum(tensor).crc32c:08x}" for name, tensor in trained_parameters(model).items()
    }


def gradient_checksums(model: torch.nn.Module, ranks: Ranks) -> Checksums:
    """Return the checksums of every gradient, as `parameter_checksums` does; a collective.

    Parameters without a gradient are left out; they must be the same ones on every rank.
    """
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _checksums({name: grad for name, grad in gradients.items() if grad is not None}, ranks)


def _checksums(tensors: Mapping[str, Tensor], ranks: Ranks) -> Checksums:
    mine = {name: _shard_checksum(tensor) for name, tensor in tensors.items()}
    by_rank = ranks.gather_objects(mine)
    whole = {name: f"{_combine_all([shards[name] for shards in by_rank]):08x}" for name in mine}
    if ranks.is_virtual:  # shards of fewer ranks
        return Checksums(whole, [])
    of_shards = [b"".join(s.crc32c.to_bytes(4) for s in shards.values()) for shards in by_rank]
    return Checksums(whole, [f"{crc32c(each):08x}" for each in of_shards])


def _shard_checksum(tensor: Tensor) -> ShardChecksum:
    position: tuple[int, ...] = ()
    local = tensor
    if isinstance(tensor, DTensor):
        rows = _gather_columns(tensor)
        coordinates = mesh_coordinates(rows)
        # Tensor parallelism, the inner dimension of the mesh, divides rows first, and FSDP what is
        # left.
        shards = [
            c for c, placed in zip(coordinates, rows.placements, strict=True) if not placed.is_replicate()
        ]
        position, local = tuple(reversed(shards)), rows.to_local()
    data = memory_of(local.detach().contiguous().cpu())
    return ShardChecksum(position, crc32c(data), data.nbytes)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy.

    `Tensor.numpy` would forbid to resize its memory, which an engine that leaves the device does.
    """
    return np.from_dlpack(tensor.reshape(-1).view(torch.uint8)).data


def _gather_columns(tensor: DTensor) -> DTensor:
    placements = [
        Replicate() if isinstance(placed, Shard) and placed.dim else placed for placed in tensor.placements
    ]
    return cast(DTensor, tensor.detach()).redistribute(placements=placements)


def _combine_all(shards: list[ShardChecksum]) -> int:
    total = 0
    first_at = {shard.position: shard for shard in reversed(shards)}  # replicas have the same position
    for position in sorted(first_at):
        total = combine(total, first_at[position].crc32c, first_at[position].size_bytes)
    return total


def combine(left: int, right: int, right_bytes: int) -> int:
    """Return crc32c(A + B) from crc32c(A), crc32c(B) and the number of bytes of B.

    Appending a zero bit to A is a linear map of its checksum over GF(2); the map for `right_bytes`
    zero bytes is built by squaring (the method of zlib's crc32_combine).
    """
    if right_bytes == 0:
        return left
    power = 0
    remaining = right_bytes
    while remaining:
        if remaining & 1:
            left = _times(_zeros_operator(power), left)
        remaining >>= 1
        power += 1
    return left ^ right


@cache
def _zeros_operator(power: int) -> tuple[int, ...]:
    """The 32 x 32 matrix, one integer per column, that appends 2**power zero bytes."""
    if power == 0:
        one_bit = (POLYNOMIAL, *(1 << n for n in range(31)))
        operator = one_bit
        for _ in range(3):  # 1 bit -> 2 -> 4 -> 8 bits
            operator = _square(operator)
        return operator
    return _square(_zeros_operator(power - 1))


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_times(matrix, column) for column in matrix)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total
