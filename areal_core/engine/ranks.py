"""The ranks of a job: which rows, tokens and parts of weights each holds, and the few collectives of our own.

Ranks are numbered with tensor parallelism innermost. Eight ranks as `d2c2t2`:

```
rank                 0 1 2 3 4 5 6 7
data-parallel        0 0 0 0 1 1 1 1    which rows: the four ranks of a group hold the same ones
sequence-parallel    0 0 1 1 0 0 1 1    which slice of their tokens
tensor-parallel      0 1 0 1 0 1 0 1    which slice of heads, features and vocabulary
sharded over         {0,2,4,6} {1,3,5,7}    FSDP: over data and sequence, ("dp_sp")
head of its group    x       x          samples, records and counts for the group
```
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_core.engine.errors import RanksError

TIMEOUT_VARIABLE = "AREAL_COLLECTIVE_TIMEOUT_S"  # seconds until a collective counts as hung
DEFAULT_TIMEOUT_S = 7200.0  # a slow evaluation or checkpoint on one rank is no hang

T = TypeVar("T")


@dataclass(frozen=True)
class Meshes:
    """The ranks as a mesh ("dp", "sp", "tp"), its line ("dp_sp") through this rank, and the group of those that hold the same rows."""

    whole: DeviceMesh
    shards: DeviceMesh
    same_rows: dist.ProcessGroup | None  # None where each rank holds rows of its own


@dataclass(frozen=True)
class Ranks:
    """This process among its peers: `rank` of `world_size`, on `device`."""

    rank: int
    world_size: int
    device: torch.device
    meshes: Meshes
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold the same rows."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that hold the same rows."""
        return self.world_size // self.model_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which rows this rank holds."""
        return self.rank // self.model_parallel_size

    @property
    def sequence_parallel_rank(self) -> int:
        """Which slice of its rows' tokens this rank holds."""
        return self.rank // self.tensor_parallel_size % self.sequence_parallel_size

    @property
    def is_data_parallel_head(self) -> bool:
        """Whether this is the one rank that samples, records and counts for those that hold the same rows."""
        return self.rank % self.model_parallel_size == 0

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks that FSDP shards parameters over, and averages gradients over: data and sequence."""
        return self.meshes.shards

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The ranks that tensor parallelism splits layers over."""
        return self.meshes.whole["tp"]

    @property
    def sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the tokens of their rows; None when each rank has all of them."""
        return self.meshes.whole.get_group("sp") if self.sequence_parallel_size > 1 else None

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over data-parallel ranks, so that each row counts once; a collective."""
        return self._sum(tensor, self.meshes.whole.get_group("dp"))

    def sum_parts(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, each of which has another part of the model; a collective."""
        return self._sum(tensor, None)

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total, group=group)
        return total.to(tensor.device)

    def maximum(self, count: int) -> int:
        """The largest of a count over ranks; a collective."""
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def gather_objects(self, value: object) -> list:
        """Every rank's value, in rank order; a collective."""
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gather_heads(self, value: object) -> list:
        """The values of the groups' heads, in data-parallel order, on every rank; a collective."""
        return self.gather_objects(value)[:: self.model_parallel_size]

    def gather_rows(self, value: object) -> list:
        """The values of the data-parallel ranks, in their order; a collective of the heads alone, or of all ranks."""
        values: list = [None] * self.data_parallel_size
        dist.all_gather_object(values, value, group=self.meshes.whole.get_group("dp"))
        return values

    def share(self, value: T) -> T:
        """The value of the head of this rank's group, on every rank of the group; a collective of the group."""
        if self.meshes.same_rows is None:
            return value
        shared = [value]
        head = self.rank - self.rank % self.model_parallel_size
        dist.broadcast_object_list(shared, src=head, group=self.meshes.same_rows)
        return shared[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier()


def join_ranks(device: str = "auto", *, sequence_parallel: int = 1, tensor_parallel: int = 1) -> Ranks:
    """Join the job that torchrun described in the environment; alone when there is none.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is one.
        sequence_parallel: ranks that share the tokens of the same rows.
        tensor_parallel: ranks that share the layers for the same tokens.

    Raises:
        RanksError: the job's ranks do not divide into such groups.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    for name, alone in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, alone)
    os.environ.setdefault("MASTER_PORT", "0")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size % (sequence_parallel * tensor_parallel):
        raise RanksError(
            f"{world_size} rank(s) cannot be divided into groups of c{sequence_parallel} x t{tensor_parallel}: start as many "
            f"ranks as allocation_mode says (torchrun --nproc-per-node)"
        )
    local = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)))
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    meshes = build_meshes(kind, world_size, sequence_parallel, tensor_parallel, timeout)
    return Ranks(rank, world_size, local, meshes, sequence_parallel, tensor_parallel)


def build_meshes(
    device_kind: str, world_size: int, sequence_parallel: int, tensor_parallel: int, timeout: timedelta
) -> Meshes:
    """The meshes of a job; a collective.

    Args:
        timeout: of what a head shares: the others wait for its rollouts there. Other groups meet after collectives of all ranks only.
    """
    model_parallel = sequence_parallel * tensor_parallel
    shape = (world_size // model_parallel, sequence_parallel, tensor_parallel)
    mesh = init_device_mesh(device_kind, shape, mesh_dim_names=("dp", "sp", "tp"))
    same_rows = dist.new_subgroups(model_parallel, timeout=timeout)[0] if model_parallel > 1 else None
    return Meshes(mesh, mesh["dp", "sp"]._flatten("dp_sp"), same_rows)


def leave_ranks() -> None:
    """Leave the job, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
