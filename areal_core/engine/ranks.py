"""The ranks of a job: rows, tokens and shards of weights of each, and their collectives.

Ranks are numbered with tensor parallelism innermost. Eight ranks as `d2c2t2`:

```
rank                 0 1 2 3 4 5 6 7
data-parallel        0 0 0 0 1 1 1 1    which rows: the four ranks of a group have the same ones
sequence-parallel    0 0 1 1 0 0 1 1    which slice of their tokens
tensor-parallel      0 1 0 1 0 1 0 1    which slice of heads, features and vocabulary
sharded over         {0,2,4,6} {1,3,5,7}    FSDP: over data and sequence, ("dp_sp")
group leader         x       x          samples, records and counts for the group: rank 0 of the group
```
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_core.errors import RanksError

TIMEOUT_VARIABLE = "AREAL_COLLECTIVE_TIMEOUT_S"  # seconds until a collective counts as hung
DEFAULT_TIMEOUT_S = 7200.0  # a slow evaluation or checkpoint on one rank is not a hang

T = TypeVar("T")


@dataclass(frozen=True)
class Meshes:
    """The meshes of a job.

    Args:
        all: every rank, with the dimensions "dp", "sp" and "tp".
        shards: the ranks that share shards with this one, with the flattened dimension "dp_sp".
        same_rows: the ranks that have the same rows as this one; None if no other rank does.
        timeout: of every group.
    """

    all: DeviceMesh
    shards: DeviceMesh
    same_rows: dist.ProcessGroup | None
    timeout: timedelta


@dataclass(frozen=True)
class Ranks:
    """This process in its job: `rank` of `world_size`, on `device`.

    With `fixed_order`, sums over ranks are taken in rank order: their bits do not depend on the
    library's algorithm.
    """

    rank: int
    world_size: int
    device: torch.device
    meshes: Meshes
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1
    fixed_order: bool = False

    @property
    def is_virtual(self) -> bool:
        """True where several ranks share a process (`virtual_ranks.py`)."""
        return False

    @property
    def sums_as_gloo(self) -> bool:
        """True where virtual ranks sum in gloo's order."""
        return False

    @property
    def has_turn(self) -> bool:
        """True unless another virtual rank of this process computes."""
        return True

    @property
    def process(self) -> "Ranks":
        """This process in the job that runs."""
        return self

    @property
    def num_summed(self) -> int:
        """Number of ranks that gradients are summed over."""
        return self.shard_mesh.size()

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that have the same rows."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that have the same rows."""
        return self.world_size // self.model_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's group, which determines its rows."""
        return self.rank // self.model_parallel_size

    @property
    def sequence_parallel_rank(self) -> int:
        """Index of this rank's slice of the tokens of its rows."""
        return self.rank // self.tensor_parallel_size % self.sequence_parallel_size

    @property
    def is_group_leader(self) -> bool:
        """True for rank 0 of a group with the same rows, which samples and records for it."""
        return self.rank % self.model_parallel_size == 0

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks that FSDP shards parameters and averages gradients over: data and sequence."""
        return self.meshes.shards

    def replicated_shards(self, shard_size: int) -> DeviceMesh:
        """Return a mesh for HSDP; a collective.

        Its dimensions are "replicate", ranks with the same shards, and "shard", consecutive ranks
        that share one copy of the weights.

        Raises:
            RanksError: the ranks do not divide into such groups, or layers are split, too.
        """
        num_ranks = self.shard_mesh.size()
        if num_ranks % shard_size or self.tensor_parallel_size > 1:
            raise RanksError(
                f"fsdp.shard_size is {shard_size}, and the weights are sharded over {num_ranks} rank(s) "
                f"with t{self.tensor_parallel_size}: give a divisor of that number, and use t1"
            )
        shape = (num_ranks // shard_size, shard_size)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():
            set_timeout(group, self.device.type, self.meshes.timeout)
        return mesh

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The ranks that tensor parallelism splits layers over."""
        return self.meshes.all["tp"]

    @property
    def sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the tokens of their rows; None when each rank has all of them."""
        return self.meshes.all.get_group("sp") if self.sequence_parallel_size > 1 else None

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over data-parallel ranks, so that each row counts once; a collective."""
        return self._sum(tensor, self.meshes.all.get_group("dp"))

    def sum_parts(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, which have different parts of the model; a collective."""
        return self._sum(tensor, None)

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        if self.fixed_order:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            return sum_in_order(parts)
        total = tensor.clone()  # reduced where it is: what is in host memory does not wait for the device
        dist.all_reduce(total, group=group)
        return total

    def once(self, compute: Callable[[], T]) -> T:
        """Return the result of a function that must run once in a process."""
        return compute()

    def begin_sum(self, model: nn.Module) -> None:
        """Start the sum of the gradients of a micro-batch over ranks."""

    def next_in_sum(self, model: nn.Module) -> None:
        """Prepare for the gradients of this rank."""

    def end_sum(self, model: nn.Module) -> None:
        """End the sum of the gradients of a micro-batch over ranks."""

    def leave(self) -> None:
        leave_ranks()

    def maximum(self, count: int) -> int:
        """Return the maximum of a count over ranks; a collective in host memory."""
        largest = torch.tensor(count)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in rank order; a collective."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gather_leaders(self, value: T) -> list[T]:
        """Return the group leaders' values, in data-parallel order, on every rank; a collective."""
        return self.gather_objects(value)[:: self.model_parallel_size]

    def gather_rows(self, value: T) -> list[T]:
        """Return the values of the data-parallel ranks, in order.

        A collective of the leaders only, or of all ranks.
        """
        values: list[Any] = [None] * self.data_parallel_size
        dist.all_gather_object(values, value, group=self.meshes.all.get_group("dp"))
        return values

    def share(self, value: T) -> T:
        """Return the group leader's value on every rank of the group; a collective of the group."""
        if self.meshes.same_rows is None:
            return value
        shared = [value]
        leader = self.rank - self.rank % self.model_parallel_size
        dist.broadcast_object_list(shared, src=leader, group=self.meshes.same_rows)
        return shared[0]

    def barrier(self) -> None:
        """Wait for every rank; a collective."""
        dist.barrier()


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added one after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def join_ranks(
    device: str = "auto",
    *,
    sequence_parallel: int = 1,
    tensor_parallel: int = 1,
    fixed_order: bool = False,
) -> Ranks:
    """Join the job that torchrun described in the environment; without one, a job of one rank.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is one.
        sequence_parallel: ranks that share the tokens of the same rows.
        tensor_parallel: ranks that share the layers for the same tokens.
        fixed_order: sums over ranks are taken in rank order.

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
            f"{world_size} rank(s) cannot be divided into groups of c{sequence_parallel} x t{tensor_parallel}: "
            f"start the number of ranks in allocation_mode (torchrun --nproc-per-node)"
        )
    local = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)))
    if world_size == 1:
        # Documented by torch, but not exported in its annotations.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    meshes = build_meshes(kind, world_size, sequence_parallel, tensor_parallel, timeout)
    return Ranks(rank, world_size, local, meshes, sequence_parallel, tensor_parallel, fixed_order)


def build_meshes(
    device_kind: str, world_size: int, sequence_parallel: int, tensor_parallel: int, timeout: timedelta
) -> Meshes:
    """Build the meshes of a job; a collective.

    Args:
        timeout: of every group. Torch's own default is 10 minutes for NCCL, and ranks may wait
            longer for each other's rollouts.
    """
    model_parallel = sequence_parallel * tensor_parallel
    shape = (world_size // model_parallel, sequence_parallel, tensor_parallel)
    mesh = init_device_mesh(device_kind, shape, mesh_dim_names=("dp", "sp", "tp"))
    shards = mesh["dp", "sp"]._flatten("dp_sp")
    same_rows = dist.new_subgroups(model_parallel, timeout=timeout)[0] if model_parallel > 1 else None
    for group in (*mesh.get_all_groups(), *shards.get_all_groups()):
        set_timeout(group, device_kind, timeout)
    return Meshes(mesh, shards, same_rows, timeout)


def set_timeout(group: dist.ProcessGroup, device_kind: str, timeout: timedelta) -> None:
    for kind in {"cpu", device_kind}:
        # `dist.set_timeout` would do, but torch 2.13 lacks it.
        group._get_backend(torch.device(kind))._set_default_timeout(timeout)


def leave_ranks() -> None:
    """Leave the job, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
