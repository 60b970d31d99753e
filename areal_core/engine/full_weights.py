"""The full weights of a sharded model, gathered in the dtype in which they are needed.

Shards are cast before they are gathered, so that bfloat16 weights cost half the bytes of their
float32 masters, and several parameters are gathered by one collective:

each rank     a parameter's shard, cast | the next one's | ...     padded to the largest shard
all ranks     the same of every rank, in rank order                then cut into full tensors
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from transformers import PreTrainedModel

from areal_core.engine.sharding import full_tensor

BUCKET_BYTES = 1 << 22  # of full tensors that are gathered at once; larger ones alone


@dataclass(frozen=True)
class FullTensors:
    """The full weights of a sharded model, cast to `dtype`.

    They are gathered when the iterator reaches them, so iterating is a collective. It can be
    iterated again, as a weight update does that lost a server.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    device: torch.device
    bucket_bytes: int = BUCKET_BYTES

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        bucket: list[tuple[str, Parameter]] = []
        size = 0
        for name, parameter in self.model.named_parameters():
            size_bytes = parameter.numel() * self.dtype.itemsize
            if bucket and (
                size + size_bytes > self.bucket_bytes or layout(parameter) != layout(bucket[0][1])
            ):
                yield from self._gather(bucket)
                bucket, size = [], 0
            bucket.append((name, parameter))
            size += size_bytes
        yield from self._gather(bucket)

    def _gather(self, bucket: list[tuple[str, Parameter]]) -> Iterator[tuple[str, Tensor]]:
        names, parameters = [name for name, _ in bucket], [parameter.detach() for _, parameter in bucket]
        cast = [parameter.to(self.device, self.dtype) for parameter in parameters]
        dimension = row_dimension(cast[0])
        if dimension is None:
            yield from zip(names, map(full_tensor, cast), strict=True)
            return
        shards = [tensor for tensor in cast if isinstance(tensor, DTensor)]
        yield from zip(names, gather_rows(shards, dimension), strict=True)


@dataclass(frozen=True)
class RenamedTensors:
    """Tensors under other names; it can be iterated again if `tensors` can."""

    tensors: Iterable[tuple[str, Tensor]]
    names: Mapping[str, str]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors:
            yield self.names[name], tensor


def layout(tensor: Tensor) -> tuple[object, ...]:
    """Return how a tensor is sharded; parameters of one bucket are sharded alike."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()


def row_dimension(tensor: Tensor) -> int | None:
    """Return the dimension of the mesh over whose ranks the rows of a tensor are sharded.

    None if it is sharded otherwise, as by tensor parallelism, or on one rank.
    """
    if not isinstance(tensor, DTensor):
        return None
    shards = [number for number, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    if len(shards) != 1 or tensor.placements[shards[0]] != Shard(0):
        return None
    return shards[0] if tensor.device_mesh.size(shards[0]) > 1 else None


def gather_rows(tensors: list[DTensor], dimension: int) -> Iterator[Tensor]:
    """Yield full tensors, gathered at once from shards of their rows; a collective.

    All have one dtype. DTensor gives each rank `ceil(rows / ranks)` rows, and the last ones what is
    left, so that the shards in rank order, padded to that size, begin with the full tensor.
    """
    mesh = tensors[0].device_mesh
    num_ranks = mesh.size(dimension)
    sizes = [-(-t.shape[0] // num_ranks) * math.prod(t.shape[1:]) for t in tensors]
    mine = torch.cat(
        [
            torch.nn.functional.pad(local.flatten(), (0, size - local.numel()))
            for local, size in zip((t.to_local() for t in tensors), sizes, strict=True)
        ]
    )
    everyone = mine.new_empty(num_ranks, mine.numel())
    dist.all_gather(list(everyone.unbind()), mine, group=mesh.get_group(dimension))
    for tensor, part in zip(tensors, everyone.split(sizes, dim=1), strict=True):
        yield part.reshape(-1)[: tensor.numel()].view(tensor.shape)
