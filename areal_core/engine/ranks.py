"""The ranks of a job and the few collectives that training needs besides FSDP's own."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT_VARIABLE = "AREAL_COLLECTIVE_TIMEOUT_S"  # seconds until a collective counts as hung
DEFAULT_TIMEOUT_S = 7200.0  # a slow evaluation or checkpoint on one rank is no hang


@dataclass(frozen=True)
class Ranks:
    """This process among its peers: `rank` of `world_size`, on `device`, with the mesh that parameters are sharded over."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over ranks; a collective."""
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
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

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier()


def join_ranks(device: str = "auto") -> Ranks:
    """Join the job that torchrun described in the environment; alone when there is none.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is one.
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
    local = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    mesh = init_device_mesh(kind, (world_size,), mesh_dim_names=("dp",))
    return Ranks(rank, world_size, local, mesh)


def leave_ranks() -> None:
    """Leave the job, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
