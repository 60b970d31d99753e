"""Tensor- and data-parallel groups: rank 3 retries alone, 2 waits for it, 0 and 1 for those two.

The ranks wait in different collectives of different groups, which is not a mismatch.

label: partial_exception
culprits: 3
ranks: 4
"""

import time

import torch
import torch.distributed as dist
from hang_point import here
from torch.distributed.device_mesh import init_device_mesh


def forward(tensor_group: dist.ProcessGroup) -> torch.Tensor:
    activations = torch.ones(4)
    if dist.get_rank() == 3:
        retry_kernel()
    if dist.get_rank() == 2:
        here()
    dist.all_reduce(activations, group=tensor_group)
    return activations


def retry_kernel() -> None:
    while True:
        try:
            raise RuntimeError("illegal memory access")
        except RuntimeError as error:
            here()
            print(f"{error}, trying again")
            time.sleep(60)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
dist.barrier()
loss = forward(mesh.get_group("tensor"))
here()
dist.all_gather([torch.empty(4), torch.empty(4)], loss, group=mesh.get_group("data"))
