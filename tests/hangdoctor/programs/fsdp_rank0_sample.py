"""FSDP2: only rank 0 runs the sharded model, to print a sample; its peers wait in the next barrier.

label: collective_mismatch
culprits: 0
ranks: 3
"""

import torch
import torch.distributed as dist
from hang_point import here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@torch.no_grad()
def print_sample(model: nn.Module) -> None:
    print(model(torch.ones(1, 8)))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(nn.Linear(8, 8), mesh=mesh)
model(torch.ones(2, 8)).sum().backward()
here()
if dist.get_rank() == 0:
    print_sample(model)
dist.barrier()
