"""One crc32c per parameter, whatever the number of ranks that hold it.

Each rank takes the checksum of its own shard, at memory speed, and the checksums of the shards are combined as if the shards had been
concatenated. So two runs of different size can be compared, and the value equals that of the tensor's bytes in a checkpoint.
"""

from dataclasses import dataclass
from functools import cache

import torch
from crc32c import crc32c
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from areal_core.engine.lora import trained_parameters
from areal_core.engine.ranks import Ranks

POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


@dataclass(frozen=True)
class ShardChecksum:
    """crc32c of some rows of a tensor. In the order of `place`, the shards of different places are the tensor."""

    place: tuple[int, ...]
    crc32c: int
    size_bytes: int


def parameter_checksums(model: torch.nn.Module, ranks: Ranks) -> dict[str, str]:
    """crc32c of every trained parameter's bytes as 8 hex digits, the same on every rank; a collective.

    Parameters are sharded along their first dimension as FSDP2 does; of what tensor parallelism divides along another, a rank gathers
    the columns of its rows, one parameter at a time.
    """
    return _checksums(trained_parameters(model), ranks)


def gradient_checksums(model: torch.nn.Module, ranks: Ranks) -> dict[str, str]:
    """The same of every parameter's gradient; parameters without one are left out, on every rank alike; a collective."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _checksums({name: grad for name, grad in gradients.items() if grad is not None}, ranks)


def _checksums(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, str]:
    mine = {name: _shard_checksum(tensor) for name, tensor in tensors.items()}
    by_rank = ranks.gather_objects(mine)
    return {name: f"{_combine_all([shards[name] for shards in by_rank]):08x}" for name in mine}


def _shard_checksum(tensor: Tensor) -> ShardChecksum:
    place: tuple[int, ...] = ()
    if isinstance(tensor, DTensor):
        tensor = _rows_of_the_whole(tensor.detach())
        coordinates = tensor.device_mesh.get_coordinate()
        # Tensor parallelism, the inner dimension of the mesh, divides rows first, and FSDP what is left.
        shards = [
            c for c, placed in zip(coordinates, tensor.placements, strict=True) if not placed.is_replicate()
        ]
        place, tensor = tuple(reversed(shards)), tensor.to_local()
    array = tensor.detach().contiguous().cpu().view(torch.uint8).flatten().numpy()
    return ShardChecksum(place, crc32c(array), array.nbytes)


def _rows_of_the_whole(tensor: DTensor) -> DTensor:
    """The same rows, of all columns: where tensor parallelism divides columns, they are gathered; a collective of its group."""
    placements = [Replicate() if placed.is_shard() and placed.dim else placed for placed in tensor.placements]
    return tensor.redistribute(placements=placements)


def _combine_all(shards: list[ShardChecksum]) -> int:
    total = 0
    first_of_place = {shard.place: shard for shard in reversed(shards)}  # ranks that hold the same part
    for place in sorted(first_of_place):
        total = combine(total, first_of_place[place].crc32c, first_of_place[place].size_bytes)
    return total


def combine(left: int, right: int, right_bytes: int) -> int:
    """crc32c(A + B) from crc32c(A), crc32c(B) and the length of B.

    Appending a zero bit to A is a linear map of its checksum over GF(2); the map for `right_bytes` zero bytes is built by squaring (the
    method of zlib's crc32_combine).
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
    """The 32 x 32 matrix, a column an integer, that appends 2**power zero bytes."""
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
