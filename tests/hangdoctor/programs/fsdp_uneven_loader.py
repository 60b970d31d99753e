"""FSDP2: rank 1 has no batch left and waits after the epoch while its peers gather parameters.

label: collective_mismatch
culprits: 1
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train_epoch(model: nn.Module, num_batches: int) -> None:
    for step in range(num_batches):
        if step == 1:
            here()
        model(torch.ones(2, 8)).sum().backward()
    here()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh)
train_epoch(model, num_batches=1 if dist.get_rank() == 1 else 2)
dist.barrier()
